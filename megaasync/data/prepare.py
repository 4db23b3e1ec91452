"""From a data config to token files in the cache: tokenizer trained if need be, documents written once, then re-used.

Imports no torch, so that a wrong file ends a run in seconds. Everything is written aside and renamed, under a lock.
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megaasync.config.schema import HfData, IndexedData, PythonStdlibData, SyntheticData
from megaasync.data import DataError
from megaasync.data.corpus import Corpus, HfCorpus, PythonStdlibCorpus, is_held_out
from megaasync.data.indexed_dataset import IndexedDataset, IndexedWriter
from megaasync.data.tokenizer import Tokenizer, train_tokenizer
from megaasync.distributed.environment import cpu_count

_FORMAT = 1  # raise when what is written changes
_BATCH = 256  # documents encoded at a time


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Where the tokens are.

    Attributes:
        train, validation: prefixes of token files; None for a source that makes its tokens itself, or for no
            validation set.
        tokenizer: sentencepiece model, None if the tokens did not come from text.
    """

    train: str | None
    validation: str | None
    tokenizer: str | None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time over all processes that share the folder."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_folder(path: Path, key: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataError(f"{key}={path}: cannot be written ({error.strerror}); set {key} to another folder") from None


def _write_tokens(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, fraction: float, say: Callable[[str], None]
) -> None:
    """Tokenize every document into folder/train and folder/validation."""
    threads = cpu_count()
    counts = {"train": 0, "validation": 0, "empty": 0}
    vocab = tokenizer.vocab_size
    with (
        IndexedWriter(folder / "train", vocab_size=vocab) as train,
        IndexedWriter(folder / "validation", vocab_size=vocab) as validation,
    ):
        documents = corpus.documents()
        while batch := list(itertools.islice(documents, _BATCH)):
            filled = [document for document in batch if document.text.strip()]
            counts["empty"] += len(batch) - len(filled)
            encoded = tokenizer.encode_documents([document.text for document in filled], threads=threads)
            for document, tokens in zip(filled, encoded, strict=True):
                held_out = is_held_out(document.key, fraction=fraction)
                (validation if held_out else train).add_document(tokens)
                counts["validation" if held_out else "train"] += 1
    say(
        f"data: tokenized {counts['train']} training and {counts['validation']} validation documents, "
        f"{counts['empty']} empty ones left out"
    )
    if counts["train"] == 0:
        raise DataError("no training document has text in it; check data.path and data.text_field")
    (folder / "counts.json").write_text(json.dumps(counts))


def _tokenizer_for(
    corpus: Corpus, cache: Path, fingerprint: str, *, vocab_size: int, fraction: float, say: Callable[[str], None]
) -> Path:
    """Path of a tokenizer trained on the corpus' training documents; trained if the cache has none."""
    key = hashlib.sha256(f"{_FORMAT}/{fingerprint}/{vocab_size}/{fraction}".encode()).hexdigest()[:20]
    path = cache / f"tokenizer-{key}.model"
    if not path.exists():
        say(f"data: training a tokenizer with {vocab_size} pieces")
        texts = (d.text for d in corpus.documents() if not is_held_out(d.key, fraction=fraction))
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_bytes(train_tokenizer(texts, vocab_size=vocab_size))
        aside.rename(path)
    return path


def _prepare_corpus(
    corpus: Corpus,
    *,
    cache_dir: str,
    tokenizer_path: str | None,
    vocab_size: int,
    fraction: float,
    say: Callable[[str], None],
) -> PreparedData:
    cache = Path(cache_dir).expanduser()
    _make_folder(cache, "data.cache_dir")
    fingerprint = corpus.fingerprint()
    with _locked(cache / "lock"):
        path = (
            Path(tokenizer_path)
            if tokenizer_path
            else _tokenizer_for(corpus, cache, fingerprint, vocab_size=vocab_size, fraction=fraction, say=say)
        )
        tokenizer = Tokenizer(path)
        if tokenizer.vocab_size > vocab_size:
            raise DataError(
                f"model.vocab_size={vocab_size}: the tokenizer {path} has {tokenizer.vocab_size} pieces; set "
                f"model.vocab_size={tokenizer.vocab_size} or more"
            )
        key = hashlib.sha256(f"{_FORMAT}/{fingerprint}/{tokenizer.fingerprint}/{fraction}".encode()).hexdigest()[:20]
        folder = cache / f"tokens-{key}"
        if not folder.exists():
            aside = cache / f"tokens-{key}.{os.getpid()}"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            try:
                _write_tokens(corpus, tokenizer, aside, fraction=fraction, say=say)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    has_validation = (folder / "validation.bin").stat().st_size > 0
    validation = str(folder / "validation") if has_validation else None
    return PreparedData(str(folder / "train"), validation, str(path))


def prepare_data(
    data: PythonStdlibData | SyntheticData | IndexedData | HfData,
    *,
    vocab_size: int,
    say: Callable[[str], None] = lambda line: None,
) -> PreparedData:
    """Make the token files that a run reads, or find them in the cache.

    Args:
        data: the data group of the config.
        vocab_size: of the model; the tokenizer's may be smaller.
        say: gets a line when something that takes time begins.

    Raises:
        DataError: a file is missing, empty or unreadable; the message names it.
    """
    match data:
        case SyntheticData():
            return PreparedData(None, None, None)
        case IndexedData():
            for prefix in filter(None, (data.path, data.validation_path)):
                IndexedDataset(prefix)
            return PreparedData(data.path, data.validation_path, None)
        case PythonStdlibData():
            corpus: Corpus = PythonStdlibCorpus()
            tokenizer_path = None
        case HfData():
            corpus, tokenizer_path = HfCorpus(data), data.tokenizer
    return _prepare_corpus(
        corpus,
        cache_dir=data.cache_dir,
        tokenizer_path=tokenizer_path,
        vocab_size=vocab_size,
        fraction=data.validation_fraction,
        say=say,
    )
