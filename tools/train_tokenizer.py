"""A sentencepiece model from text, with byte fallback and an exact round trip.

python tools/train_tokenizer.py --input 'data/*.txt' --vocab-size 32000 --output t.model
"""

import argparse
import sys
from pathlib import Path

from command_line import as_flags, check_output
from megaasync.config import ConfigError
from megaasync.config.schema import HfData
from megaasync.config.validate import SMALLEST_TRAINED_VOCABULARY
from megaasync.data import DataError
from megaasync.data.corpus import HfCorpus, PythonStdlibCorpus
from megaasync.data.tokenizer import Tokenizer, train_tokenizer


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True, help="a file, a glob, a hub name, or python_stdlib")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of pieces, at least 400")
    parser.add_argument("--output", required=True, help="the .model file to write")
    parser.add_argument("--text-field", default="text", help="column with the text")
    parser.add_argument("--split", default="train", help="split of a hub dataset")
    parser.add_argument("--cache-dir", default=str(Path.home() / ".cache/megaasync"))
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
        on_bad_bytes="stop",
    )
    try:
        corpus = PythonStdlibCorpus() if arguments.input == "python_stdlib" else HfCorpus(data)
        output = Path(arguments.output)
        check_output("--output", output.parent, is_folder=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        texts = (document.text for document in corpus.documents())
        output.write_bytes(train_tokenizer(texts, vocab_size=arguments.vocab_size))
    except (DataError, ConfigError, OSError) as error:
        print(f"error: {as_flags(str(error))}", file=sys.stderr)
        return 2
    print(f"{output}: {Tokenizer(output).vocab_size:,} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
