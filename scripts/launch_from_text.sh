#!/usr/bin/env bash
# From raw text to a submitted job: a tokenizer, token files for training and validation, and the launch.
#     scripts/launch_from_text.sh TEXT FOLDER [key=value ...]
# TEXT is a file, a folder or a glob in quotes; FOLDER gets tokenizer.model, train and validation; the rest goes to
# python -m megaasync.launch. What is in FOLDER already is used again. VOCAB_SIZE (49152) and VALIDATION (0.005, the
# share of documents held out) choose what is made.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n 's/^# \{0,1\}//; 2,6p' "$0" >&2
    exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
text="$1" folder="$2"
shift 2
python="${PYTHON:-python}"
mkdir -p "$folder"
if [ ! -e "$folder/tokenizer.model" ]; then
    "$python" "$root/tools/train_tokenizer.py" --input "$text" --vocab-size "${VOCAB_SIZE:-49152}" \
        --output "$folder/tokenizer.model"
fi
if [ ! -e "$folder/train.idx" ]; then
    "$python" "$root/tools/preprocess_data.py" --input "$text" --tokenizer "$folder/tokenizer.model" \
        --output "$folder/train" --validation-output "$folder/validation" --validation-fraction "${VALIDATION:-0.005}"
fi
validation="$folder/validation"
[ -e "$folder/validation.idx" ] || validation=null
exec "$python" -m megaasync.launch "$@" "data.path=$folder/train" "data.validation_path=$validation"
