#!/usr/bin/env bash
# The optimizer study of docs/optimizers.md, from nothing to its tables and pictures: scripts/study_optimizers.sh [study ...]
# Without arguments every study runs, in about four hours on two cores; what is done already is kept. Results: runs/study.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
studies=("$@")
if [ ${#studies[@]} -eq 0 ]; then
    studies=(headline tuning full momentum batch depth phases time_to_loss)
fi
for study in "${studies[@]}"; do
    echo "== $study"
    "$PYTHON" tools/delay_study.py "study=$study"
    if [ "$study" = time_to_loss ]; then
        "$PYTHON" -m tools.study.time_to_loss
    fi
done
if [ $# -eq 0 ]; then
    echo "== theory"
    "$PYTHON" -m tools.study.delay_theory
fi
