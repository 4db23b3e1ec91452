"""A sentencepiece model from text, with byte fallback and an exact round trip.

python tools/train_tokenizer.py --input 'data/*.txt' --vocab-size 32000 --output t.model
"""

import argparse
import sys
from pathlib import Path

from megaasync.config import ConfigError
from megaasync.config.rules.data import SMALLEST_TRAINED_VOCABULARY
from megaasync.config.schema import HfData
from megaasync.data import DataError
from megaasync.data.corpus import PythonStdlibCorpus, open_corpus
from megaasync.data.tokenizer import Tokenizer, sample_texts, train_tokenizer
from megaasync.distributed.environment import default_cache

from ..command_line import as_flags, check_output


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True, help="a file, a glob, a hub name, or python_stdlib")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of pieces, at least 400")
    parser.add_argument("--output", required=True, help="the .model file to write")
    parser.add_argument("--text-field", default="text", help="column with the text")
    parser.add_argument("--split", default="train", help="split of a hub dataset")
    parser.add_argument("--on-bad-bytes", choices=("stop", "replace"), default="stop")
    parser.add_argument(
        "--max-bytes", type=int, default=32_000_000, help="most text to train on, sampled evenly over all documents"
    )
    parser.add_argument("--cache-dir", default=str(default_cache()))
    arguments = parser.parse_args()
    if arguments.vocab_size < SMALLEST_TRAINED_VOCABULARY:
        parser.error(f"--vocab-size {arguments.vocab_size}: must be at least {SMALLEST_TRAINED_VOCABULARY}")
    data = HfData(
        name="hf",
        path=arguments.input,
        split=arguments.split,
        text_field=arguments.text_field,
        tokenizer=None,
        cache_dir=arguments.cache_dir,
        validation_fraction=0.0,
        tokenizer_bytes=arguments.max_bytes,
        on_bad_bytes=arguments.on_bad_bytes,
    )
    try:
        corpus = PythonStdlibCorpus() if arguments.input == "python_stdlib" else open_corpus(data, notify=print)
        output = Path(arguments.output)
        check_output("--output", output.parent, is_folder=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        sample = sample_texts((document.text for document in corpus.documents()), max_bytes=arguments.max_bytes)
        print(
            f"training on {sample.used_bytes / 1e6:.1f} of {sample.total_bytes / 1e6:.1f} MB, spread evenly over "
            f"{sample.documents:,} documents (--max-bytes)"
        )
        output.write_bytes(train_tokenizer(sample.units, vocab_size=arguments.vocab_size))
    except (DataError, ConfigError, OSError) as error:
        print(f"error: {as_flags(str(error))}", file=sys.stderr)
        return 2
    print(f"{output}: {Tokenizer(output).vocab_size:,} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
