"""Text, jsonl, parquet or a hub dataset into an indexed pair of token files in Megatron's MMIDIDX layout.

python tools/preprocess_data.py --input 'data/*.jsonl' --tokenizer t.model --output out/tokens
"""

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megaasync.config import ConfigError
from megaasync.config.schema import HfData
from megaasync.data import DataError
from megaasync.data.corpus import Corpus, Document, PythonStdlibCorpus, is_held_out, open_corpus
from megaasync.data.identity import file_of, write_manifest
from megaasync.data.indexed_dataset import IndexedWriter
from megaasync.data.prepare import say_unknown
from megaasync.data.tokenizer import Tokenizer
from megaasync.distributed.environment import cpu_count, default_cache

from ..command_line import as_flags, check_output

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
        notify=print,
    )


@dataclass(slots=True)
class _Part:
    """Documents of training or of validation, while they are written.

    Attributes:
        output: prefix of the files to be.
        aside: prefix of the files until they are whole.
        writer: of them.
        documents, tokens, unknown: written so far.
    """

    output: Path
    aside: Path
    writer: IndexedWriter
    documents: int = 0
    tokens: int = 0
    unknown: int = 0

    def add(self, ids: list[int], *, unknown_id: int) -> None:
        """Append one document."""
        self.writer.add_document(ids)
        self.documents += 1
        self.tokens += len(ids)
        self.unknown += ids.count(unknown_id)

    def move_into_place(self, tokenizer: Tokenizer) -> None:
        """Give whole files their names, with a manifest of what they hold."""
        command = shlex.join(sys.argv)
        facts = {"documents": self.documents, "tokens": self.tokens, "tokenizer": tokenizer.fingerprint}
        write_manifest(self.aside, facts={**facts, "command": command})
        file_of(self.output, ".manifest.json").unlink(missing_ok=True)  # of the files that are replaced now
        for suffix in _SUFFIXES:  # a reader looks for the index first
            file_of(self.aside, suffix).rename(file_of(self.output, suffix))


def preprocess(arguments: argparse.Namespace) -> str:
    """Write the files; returns a line that says what was written.

    Raises:
        DataError: the input or the tokenizer cannot be read, or holds no text.
    """
    tokenizer = Tokenizer(arguments.tokenizer)
    documents = _corpus(arguments).documents()
    outputs = [Path(prefix) for prefix in (arguments.output, arguments.validation_output) if prefix is not None]
    asides = [output.with_name(f".{output.name}.{os.getpid()}.partial") for output in outputs]
    for output in outputs:
        check_output("--output", output.parent, is_folder=True)
        output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            parts = [
                _Part(output, aside, stack.enter_context(IndexedWriter(aside, vocab_size=tokenizer.vocab_size)))
                for output, aside in zip(outputs, asides, strict=True)
            ]
            empty = _write(arguments, tokenizer, documents, parts)
        say_unknown(sum(part.unknown for part in parts), sum(part.tokens for part in parts), notify=print)
        written = [part for part in parts if part.documents]
        for part in written:
            part.move_into_place(tokenizer)
    finally:
        for aside in asides:
            for suffix in _SUFFIXES:
                file_of(aside, suffix).unlink(missing_ok=True)
    lines = [f"{part.output}.bin and .idx: {part.documents:,} documents, {part.tokens:,} tokens" for part in written]
    return f"{'; '.join(lines)}; {empty:,} empty documents left out"


def _write(
    arguments: argparse.Namespace, tokenizer: Tokenizer, documents: Iterator[Document], parts: list[_Part]
) -> int:
    """Tokenize all documents into the parts; returns how many were empty."""
    empty = told = 0
    while batch := list(itertools.islice(documents, _BATCH)):
        filled = [document for document in batch if document.text.strip()]
        empty += len(batch) - len(filled)
        encoded = tokenizer.encode_documents([document.text for document in filled], threads=cpu_count())
        for document, ids in zip(filled, encoded, strict=True):
            held_out = len(parts) > 1 and is_held_out(document.key, fraction=arguments.validation_fraction)
            parts[held_out].add(ids, unknown_id=tokenizer.unknown_id)
        count, tokens = (sum(getattr(part, name) for part in parts) for name in ("documents", "tokens"))
        if count // _SAY_EVERY > told:
            told = count // _SAY_EVERY
            print(f"{count:,} documents, {tokens:,} tokens", flush=True)
    if parts[0].documents == 0:
        raise DataError(f"--input {arguments.input}: no document has text in it")
    return empty


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", required=True, help="a file, a glob, a hub name, or python_stdlib")
    parser.add_argument("--tokenizer", required=True, help="a sentencepiece model (tools/train_tokenizer.py)")
    parser.add_argument("--output", required=True, help="prefix of the .bin and .idx files")
    parser.add_argument("--validation-output", help="prefix of files for held-out documents; none are held out without")
    parser.add_argument("--validation-fraction", type=float, default=0.01, help="share of documents held out")
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
