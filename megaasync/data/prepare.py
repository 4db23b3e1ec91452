"""From a data config to token files in the cache: tokenizer trained if need be, documents written once, then re-used.

Imports no torch, so that a wrong file ends a run in seconds. Everything is written aside and renamed, under a lock.
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megaasync.config.schema import HfData, IndexedData, PythonStdlibData, SyntheticData
from megaasync.data import DataError
from megaasync.data.corpus import Corpus, PythonStdlibCorpus, is_held_out, open_corpus
from megaasync.data.identity import Identity, Notify, identify_tokens, write_manifest
from megaasync.data.indexed_dataset import IndexedDataset, IndexedWriter
from megaasync.data.tokenizer import Tokenizer, sample_texts, train_tokenizer
from megaasync.distributed.environment import cpu_count, default_cache

_FORMAT = 2  # raise when what is written changes
_BATCH = 256  # documents encoded at a time
_MUCH_UNKNOWN = 0.01  # share of unknown pieces that is warned of


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Where the tokens are.

    Attributes:
        train, validation: prefixes of token files; None for a source that makes its tokens itself, or for no
            validation set.
        tokenizer: sentencepiece model, None if the tokens did not come from text.
        identity: hashes of their contents, for checkpoints and resumes; empty where nobody asked.
    """

    train: str | None
    validation: str | None
    tokenizer: str | None
    identity: Identity = field(default_factory=dict)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """One builder at a time over all processes that share the folder; False where the file system has no locks."""
    try:
        file = open(path, "a")  # noqa: SIM115 - closed below
    except OSError as error:
        raise DataError(
            f"data.cache_dir={path.parent}: {path.name} cannot be opened ({error.strerror}), so others cannot be "
            "kept from writing there; set data.cache_dir to a folder of your own"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # as on NFS without its lock service, or Lustre without flock: builders may do work twice
            yield False
            return
        yield True


def _make_folder(path: Path, key: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataError(f"{key}={path}: cannot be written ({error.strerror}); set {key} to another folder") from None


def _write_tokens(corpus: Corpus, tokenizer: Tokenizer, folder: Path, *, fraction: float, notify: Notify) -> None:
    """Tokenize every document into folder/train and folder/validation."""
    threads = cpu_count()
    counts = {"train": 0, "validation": 0, "empty": 0, "tokens": 0, "unknown": 0}
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
                counts["tokens"] += len(tokens)
                counts["unknown"] += int(np.count_nonzero(np.asarray(tokens) == tokenizer.unknown_id))
    notify(
        f"data: tokenized {counts['train']} training and {counts['validation']} validation documents, "
        f"{counts['empty']} empty ones left out"
    )
    say_unknown(counts["unknown"], counts["tokens"], notify=notify)
    if counts["train"] == 0:
        raise DataError("no training document has text in it; check data.path and data.text_field")
    for name in ("train", "validation"):
        write_manifest(folder / name, facts={"tokenizer": tokenizer.fingerprint, "documents": counts[name]})
    (folder / "counts.json").write_text(json.dumps(counts))


def say_unknown(unknown: int, tokens: int, *, notify: Notify) -> None:
    """Tell how much of a text the tokenizer has no piece for: all of that is one and the same token."""
    if unknown:
        share = unknown / tokens
        warning = (
            "; WARNING: this much text is lost to the model, take a tokenizer with byte fallback or one that was made "
            "for this text (data.tokenizer)"
        )
        notify(
            f"data: {unknown} of {tokens} tokens ({share:.2%}) are unknown to the tokenizer"
            f"{warning if share > _MUCH_UNKNOWN else ''}"
        )


@dataclass(frozen=True, slots=True)
class _Cache:
    """The cache entries of one corpus: a tokenizer, if it is trained on it, and token files."""

    folder: Path
    corpus_fingerprint: str
    tokenizer_path: str | None
    vocab_size: int
    fraction: float
    training_bytes: int

    def tokenizer(self) -> Path:
        """Where the tokenizer is, or will be."""
        if self.tokenizer_path is not None:
            return Path(self.tokenizer_path)
        key = f"{_FORMAT}/{self.corpus_fingerprint}/{self.vocab_size}/{self.fraction}/{self.training_bytes}"
        return self.folder / f"tokenizer-{_short_hash(key)}.model"

    def tokens(self, tokenizer: Tokenizer) -> Path:
        """Where the token files are, or will be."""
        key = f"{_FORMAT}/{self.corpus_fingerprint}/{tokenizer.fingerprint}/{self.fraction}"
        return self.folder / f"tokens-{_short_hash(key)}"

    @staticmethod
    def is_whole(folder: Path) -> bool:
        """Whether token files are there that were finished: they come by one rename."""
        return (folder / "counts.json").exists()

    def find(self, *, notify: Notify) -> PreparedData | None:
        """What is there whole; None if anything is missing or damaged, as after a full disk."""
        if self.tokenizer_path is None and not self.tokenizer().exists():
            return None
        try:
            tokenizer = Tokenizer(self.tokenizer())
            folder = self.tokens(tokenizer)
            IndexedDataset(folder / "train")
            identity: dict[str, str | None] = {"tokenizer": tokenizer.fingerprint, "validation": None}
            identity["train"] = identify_tokens(folder / "train", memory=self.folder / "hashes", notify=notify)
            has_validation = json.loads((folder / "counts.json").read_text())["validation"] > 0
            if has_validation:
                IndexedDataset(folder / "validation")
                identity["validation"] = identify_tokens(
                    folder / "validation", memory=self.folder / "hashes", notify=notify
                )
        except (DataError, OSError, ValueError):
            if self.tokenizer_path is not None:
                Tokenizer(self.tokenizer())  # the user's own file: let its error be seen
            return None
        validation = str(folder / "validation") if has_validation else None
        return PreparedData(str(folder / "train"), validation, str(self.tokenizer()), identity)


def _size(number: int) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 1e5 else f"{number / 1e3:.1f} kB"


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _build(corpus: Corpus, cache: _Cache, *, is_alone: bool, notify: Notify) -> None:
    """Make what is missing of a cache entry.

    Args:
        corpus: the documents.
        cache: where to.
        is_alone: the folder is locked. Otherwise another process may build the same beside this one: each writes
            under names of its own, and the first to finish wins.
        notify: gets a line when something that takes time begins.
    """
    if is_alone:
        for left in (*cache.folder.glob("tokens-*.*"), *cache.folder.glob("tokenizer-*.part")):
            # whoever made these is gone: we hold the lock
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    own = f"{os.getpid()}-{os.urandom(4).hex()}.part"
    path = cache.tokenizer()
    if cache.tokenizer_path is None and not _is_tokenizer(path):
        texts = (d.text for d in corpus.documents() if not is_held_out(d.key, fraction=cache.fraction))
        sample = sample_texts(texts, max_bytes=cache.training_bytes)
        amount = "all of" if sample.used_bytes == sample.total_bytes else "a sample spread evenly over"
        notify(
            f"data: training a tokenizer with {cache.vocab_size} pieces on {_size(sample.used_bytes)}, {amount} "
            f"the {_size(sample.total_bytes)} of {sample.documents} documents (data.tokenizer_bytes)"
        )
        aside = path.with_name(f"{path.name}.{own}")
        aside.write_bytes(train_tokenizer(sample.units, vocab_size=cache.vocab_size))
        aside.rename(path)
    tokenizer = Tokenizer(path)
    folder = cache.tokens(tokenizer)
    if is_alone or not cache.is_whole(folder):
        shutil.rmtree(folder, ignore_errors=True)
    aside = folder.with_name(f"{folder.name}.{own}")
    aside.mkdir()
    try:
        _write_tokens(corpus, tokenizer, aside, fraction=cache.fraction, notify=notify)
        try:
            aside.rename(folder)
        except OSError:
            if not cache.is_whole(folder):  # else another process was quicker
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_tokenizer(path: Path) -> bool:
    try:
        Tokenizer(path)
    except DataError:
        return False
    return True


def _prepare_corpus(corpus: Corpus, cache: _Cache, *, notify: Notify) -> PreparedData:
    if cache.tokenizer_path is not None:
        pieces = Tokenizer(cache.tokenizer_path).vocab_size
        if pieces > cache.vocab_size:
            raise DataError(
                f"model.vocab_size={cache.vocab_size}: the tokenizer {cache.tokenizer_path} has {pieces} pieces; set "
                f"model.vocab_size={pieces} or more"
            )
    prepared = cache.find(notify=notify)  # needs no writing, so a cache may be read-only
    if prepared is not None:
        return prepared
    _make_folder(cache.folder, "data.cache_dir")
    with _locked(cache.folder / "lock") as is_alone:
        prepared = cache.find(notify=notify)
        if prepared is None:
            _build(corpus, cache, is_alone=is_alone, notify=notify)
            prepared = cache.find(notify=notify)
    if prepared is None:
        raise DataError(f"data.cache_dir={cache.folder}: what was just written cannot be read back; is the disk full?")
    return prepared


def prepare_data(
    data: PythonStdlibData | SyntheticData | IndexedData | HfData,
    *,
    vocab_size: int,
    notify: Notify = lambda line: None,
    identify: bool = True,
) -> PreparedData:
    """Make the token files that a run reads, or find them in the cache.

    Args:
        data: the data group of the config.
        vocab_size: of the model; the tokenizer's may be smaller.
        notify: gets a line when something that takes time begins.
        identify: hash the contents of token files that the user gave; large ones take minutes the first time, and one
            rank of a job is enough.

    Raises:
        DataError: a file is missing, empty or unreadable; the message names it.
    """
    match data:
        case SyntheticData():
            return PreparedData(None, None, None)
        case IndexedData():
            return _user_files(data, vocab_size=vocab_size, notify=notify, identify=identify)
        case PythonStdlibData():
            corpus: Corpus = PythonStdlibCorpus()
            tokenizer_path = None
        case HfData():
            corpus = open_corpus(data, notify=notify)
            tokenizer_path = data.tokenizer and str(Path(data.tokenizer).expanduser())
    cache = _Cache(
        folder=Path(data.cache_dir).expanduser(),
        corpus_fingerprint=corpus.fingerprint(),
        tokenizer_path=tokenizer_path,
        vocab_size=vocab_size,
        fraction=data.validation_fraction,
        training_bytes=data.tokenizer_bytes,
    )
    return _prepare_corpus(corpus, cache, notify=notify)


def _user_files(data: IndexedData, *, vocab_size: int, notify: Notify, identify: bool) -> PreparedData:
    prefixes = {"train": data.path, "validation": data.validation_path}
    prefixes = {name: path and str(Path(path).expanduser()) for name, path in prefixes.items()}
    for prefix in filter(None, prefixes.values()):
        IndexedDataset(prefix).check_ids(vocab_size)
    prepared = PreparedData(prefixes["train"], prefixes["validation"], None)
    if not identify:
        return prepared
    identity: dict[str, str | None] = {"tokenizer": None}
    for name, prefix in prefixes.items():
        identity[name] = prefix and identify_tokens(prefix, memory=default_cache() / "hashes", notify=notify)
    return replace(prepared, identity=identity)
