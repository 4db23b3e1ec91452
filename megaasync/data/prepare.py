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


@dataclass(frozen=True, slots=True)
class _Cache:
    """The cache entries of one corpus: a tokenizer, if it is trained on it, and token files."""

    folder: Path
    corpus_fingerprint: str
    tokenizer_path: str | None
    vocab_size: int
    fraction: float

    def tokenizer(self) -> Path:
        """Where the tokenizer is, or will be."""
        if self.tokenizer_path is not None:
            return Path(self.tokenizer_path)
        key = f"{_FORMAT}/{self.corpus_fingerprint}/{self.vocab_size}/{self.fraction}"
        return self.folder / f"tokenizer-{_short_hash(key)}.model"

    def tokens(self, tokenizer: Tokenizer) -> Path:
        """Where the token files are, or will be."""
        key = f"{_FORMAT}/{self.corpus_fingerprint}/{tokenizer.fingerprint}/{self.fraction}"
        return self.folder / f"tokens-{_short_hash(key)}"

    def find(self) -> PreparedData | None:
        """What is there whole; None if anything is missing or damaged, as after a full disk."""
        if self.tokenizer_path is None and not self.tokenizer().exists():
            return None
        try:
            tokenizer = Tokenizer(self.tokenizer())
            folder = self.tokens(tokenizer)
            IndexedDataset(folder / "train")
            has_validation = json.loads((folder / "counts.json").read_text())["validation"] > 0
            if has_validation:
                IndexedDataset(folder / "validation")
        except (DataError, OSError, ValueError):
            if self.tokenizer_path is not None:
                Tokenizer(self.tokenizer())  # the user's own file: let its error be seen
            return None
        validation = str(folder / "validation") if has_validation else None
        return PreparedData(str(folder / "train"), validation, str(self.tokenizer()))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _build(corpus: Corpus, cache: _Cache, *, say: Callable[[str], None]) -> None:
    """Make what is missing of a cache entry, under the lock."""
    for left in (*cache.folder.glob("tokens-*.*"), *cache.folder.glob("tokenizer-*.part")):
        # whoever made these is gone: we hold the lock
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    path = cache.tokenizer()
    if cache.tokenizer_path is None and not _is_tokenizer(path):
        say(f"data: training a tokenizer with {cache.vocab_size} pieces")
        texts = (d.text for d in corpus.documents() if not is_held_out(d.key, fraction=cache.fraction))
        aside = path.with_suffix(".part")
        aside.write_bytes(train_tokenizer(texts, vocab_size=cache.vocab_size))
        aside.rename(path)
    tokenizer = Tokenizer(path)
    folder = cache.tokens(tokenizer)
    shutil.rmtree(folder, ignore_errors=True)
    aside = folder.with_name(folder.name + ".part")
    aside.mkdir()
    try:
        _write_tokens(corpus, tokenizer, aside, fraction=cache.fraction, say=say)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_tokenizer(path: Path) -> bool:
    try:
        Tokenizer(path)
    except DataError:
        return False
    return True


def _prepare_corpus(corpus: Corpus, cache: _Cache, *, say: Callable[[str], None]) -> PreparedData:
    if cache.tokenizer_path is not None:
        pieces = Tokenizer(cache.tokenizer_path).vocab_size
        if pieces > cache.vocab_size:
            raise DataError(
                f"model.vocab_size={cache.vocab_size}: the tokenizer {cache.tokenizer_path} has {pieces} pieces; set "
                f"model.vocab_size={pieces} or more"
            )
    prepared = cache.find()  # needs no writing, so a cache may be read-only
    if prepared is not None:
        return prepared
    _make_folder(cache.folder, "data.cache_dir")
    with _locked(cache.folder / "lock"):
        prepared = cache.find()
        if prepared is None:
            _build(corpus, cache, say=say)
            prepared = cache.find()
    if prepared is None:
        raise DataError(f"data.cache_dir={cache.folder}: what was just written cannot be read back; is the disk full?")
    return prepared


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
                IndexedDataset(prefix).check_ids(vocab_size)
            return PreparedData(data.path, data.validation_path, None)
        case PythonStdlibData():
            corpus: Corpus = PythonStdlibCorpus()
            tokenizer_path = None
        case HfData():
            corpus, tokenizer_path = HfCorpus(data), data.tokenizer
    cache = _Cache(
        folder=Path(data.cache_dir).expanduser(),
        corpus_fingerprint=corpus.fingerprint(),
        tokenizer_path=tokenizer_path,
        vocab_size=vocab_size,
        fraction=data.validation_fraction,
    )
    return _prepare_corpus(corpus, cache, say=say)
