"""Text, jsonl, parquet or a hub dataset into an indexed pair of token files in Megatron's MMIDIDX layout.

python tools/preprocess_data.py --input 'data/*.jsonl' --tokenizer t.model --output out/tokens
"""

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from command_line import as_flags, check_output
from megaasync.config import ConfigError
from megaasync.config.schema import HfData
from megaasync.data import DataError
from megaasync.data.corpus import Corpus, Document, PythonStdlibCorpus, open_corpus
from megaasync.data.identity import file_of, write_manifest
from megaasync.data.indexed_dataset import IndexedWriter
from megaasync.data.prepare import say_unknown
from megaasync.data.tokenizer import Tokenizer
from megaasync.distributed.environment import cpu_count, default_cache

_SUFFIXES = (".bin", ".idx", ".manifest.json")
_BATCH = 256
_SAY_EVERY = 20_000


def _corpus(arguments: argparse.Namespace) -> Corpus:
    if arguments.input == "python_stdlib":
        return PythonStdlibCorpus()
    return open_corpus(
        HfData(
            name="hf",
            path=arguments.input,
            split=arguments.split,
            text_field=arguments.text_field,
            tokenizer=arguments.tokenizer,
            cache_dir=arguments.cache_dir,
            validation_fraction=0.0,
            tokenizer_bytes=32_000_000,
            on_bad_bytes=arguments.on_bad_bytes,
        ),
        say=print,
    )


def preprocess(arguments: argparse.Namespace) -> str:
    """Write the files; returns a line that says what was written.

    Raises:
        DataError: the input or the tokenizer cannot be read, or holds no text.
    """
    tokenizer = Tokenizer(arguments.tokenizer)
    documents = _corpus(arguments).documents()
    output = Path(arguments.output)
    check_output("--output", output.parent, is_folder=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        return _write(arguments, tokenizer, documents, output, aside)
    finally:
        for suffix in _SUFFIXES:
            file_of(aside, suffix).unlink(missing_ok=True)


def _write(
    arguments: argparse.Namespace, tokenizer: Tokenizer, documents: Iterator[Document], output: Path, aside: Path
) -> str:
    written = empty = tokens = unknown = 0
    with IndexedWriter(aside, vocab_size=tokenizer.vocab_size) as writer:
        while batch := list(itertools.islice(documents, _BATCH)):
            texts = [document.text for document in batch if document.text.strip()]
            empty += len(batch) - len(texts)
            for ids in tokenizer.encode_documents(texts, threads=cpu_count()):
                writer.add_document(ids)
                tokens += len(ids)
                unknown += ids.count(tokenizer.unknown_id)
            if (written + len(texts)) // _SAY_EVERY > written // _SAY_EVERY:
                print(f"{written + len(texts):,} documents, {tokens:,} tokens", flush=True)
            written += len(texts)
    if written == 0:
        raise DataError(f"--input {arguments.input}: no document has text in it")
    say_unknown(unknown, tokens, say=print)
    command = shlex.join(sys.argv)
    facts = {"documents": written, "tokens": tokens, "tokenizer": tokenizer.fingerprint, "command": command}
    write_manifest(aside, facts=facts)
    file_of(output, ".manifest.json").unlink(missing_ok=True)  # of the files that are replaced now
    for suffix in _SUFFIXES:  # a reader looks for the index first
        file_of(aside, suffix).rename(file_of(output, suffix))
    return f"{output}.bin and .idx: {written:,} documents, {tokens:,} tokens; {empty:,} empty documents left out"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True, help="a file, a glob, a hub name, or python_stdlib")
    parser.add_argument("--tokenizer", required=True, help="a sentencepiece model (tools/train_tokenizer.py)")
    parser.add_argument("--output", required=True, help="prefix of the .bin and .idx files")
    parser.add_argument("--text-field", default="text", help="column with the text")
    parser.add_argument("--split", default="train", help="split of a hub dataset")
    parser.add_argument("--on-bad-bytes", choices=("stop", "replace"), default="stop")
    parser.add_argument("--cache-dir", default=str(default_cache()))
    try:
        print(preprocess(parser.parse_args()))
    except (DataError, ConfigError, OSError) as error:
        print(f"error: {as_flags(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
