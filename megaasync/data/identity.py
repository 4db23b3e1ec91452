"""What files hold, by hash. A name, a size or a time stamp is not the content, so runs and caches compare hashes.

A full hash of a large file takes minutes. It is kept with the file's size, modification time and a hash of 64 blocks
spread over the file; while these three agree the full hash is taken from the record, else it is computed again.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaasync.config.schema import ConfigError
from megaasync.data import DataError

_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
_READ_BYTES = 1 << 24
_PROGRESS_SECONDS = 5.0
_SUFFIXES = (".bin", ".idx")

Notify = Callable[[str], None]
Identity = Mapping[str, str | None]  # tokenizer, train, validation -> SHA-256, None where a run has none of it


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file's content.

    Attributes:
        size: bytes.
        mtime_ns: modification time when it was hashed.
        samples: SHA-256 of 64 blocks of 64 KiB spread evenly over the file; of all of a smaller file.
        sha256: of the whole file.
    """

    size: int
    mtime_ns: int
    samples: str
    sha256: str


def sampled_hash(path: Path) -> str:
    """SHA-256 of 64 blocks of a file, its first and last bytes among them; reads at most 4 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
        else:
            for number in range(_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _full_hash(path: Path, *, notify: Notify) -> str:
    """SHA-256 of a file, with a line now and then if it takes long."""
    digest, done, told = hashlib.sha256(), 0, time.monotonic()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while block := file.read(_READ_BYTES):
            digest.update(block)
            done += len(block)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                notify(f"data: hashing {path}, {done / 2**30:.1f} of {size / 2**30:.1f} GiB")
    return digest.hexdigest()


def record_of(path: Path, known: FileRecord | None, *, notify: Notify) -> FileRecord:
    """A file's record; `known` itself if size, time and samples are still the same."""
    status, samples = path.stat(), sampled_hash(path)
    if known is not None and (known.size, known.mtime_ns, known.samples) == (
        status.st_size,
        status.st_mtime_ns,
        samples,
    ):
        return known
    return FileRecord(status.st_size, status.st_mtime_ns, samples, _full_hash(path, notify=notify))


def _read_record(content: Any) -> FileRecord | None:
    try:
        record = FileRecord(**content)
    except TypeError:
        return None
    return record if all(isinstance(value, str | int) for value in asdict(record).values()) else None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write_aside(path: Path, content: Any) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.rename(path)


def remembered_record(path: Path, memory: Path, *, notify: Notify) -> FileRecord:
    """The record of a file that has no manifest of its own, remembered in a folder where that can be written.

    Args:
        path: the file.
        memory: folder of records, by the file's resolved path.
        notify: gets a progress line when a large file has to be hashed in full.
    """
    place = memory / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    known = _read_record(_read_json(place))
    record = record_of(path, known, notify=notify)
    if record != known:
        with suppress(OSError):  # without a memory it is hashed again next time
            memory.mkdir(parents=True, exist_ok=True)
            _write_aside(place, asdict(record))
    return record


def file_of(prefix: str | Path, suffix: str) -> Path:
    """PREFIX.bin, PREFIX.idx or PREFIX.manifest.json; dots in the prefix stay."""
    return Path(f"{prefix}{suffix}")


def write_manifest(prefix: Path, *, facts: Mapping[str, Any] | None = None) -> None:
    """Write PREFIX.manifest.json: the records of PREFIX.bin and PREFIX.idx, and what the writer knows beside them."""
    files = {suffix: asdict(record_of(file_of(prefix, suffix), None, notify=lambda line: None)) for suffix in _SUFFIXES}
    _write_aside(file_of(prefix, ".manifest.json"), {"format": 1, "files": files, **(facts or {})})


def _combined(records: Mapping[str, FileRecord]) -> str:
    return hashlib.sha256("".join(records[suffix].sha256 for suffix in _SUFFIXES).encode()).hexdigest()


def identify_tokens(prefix: str | Path, *, memory: Path, notify: Notify) -> str:
    """SHA-256 that stands for the content of PREFIX.bin and PREFIX.idx.

    Args:
        prefix: of the pair.
        memory: folder of records, for files without a manifest.
        notify: gets a progress line when a large file has to be hashed in full.

    Raises:
        DataError: the files are not what their manifest says.
    """
    manifest = file_of(prefix, ".manifest.json")
    content = _read_json(manifest)
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        paths = {suffix: file_of(prefix, suffix) for suffix in _SUFFIXES}
        return _combined({suffix: remembered_record(path, memory, notify=notify) for suffix, path in paths.items()})
    known = {suffix: _read_record(content["files"].get(suffix)) for suffix in _SUFFIXES}
    found = {suffix: record_of(file_of(prefix, suffix), known[suffix], notify=notify) for suffix in _SUFFIXES}
    for suffix, record in found.items():
        if known[suffix] is None or record.sha256 != known[suffix].sha256:
            raise DataError(
                f"{file_of(prefix, suffix)}: is not the file that {manifest.name} was written for (its hash differs): "
                "damaged, or overwritten by another; write both files again, or remove the manifest if the new "
                "content is meant"
            )
    if found != known:  # copied or touched: the content is the same
        with suppress(OSError):
            _write_aside(manifest, content | {"files": {suffix: asdict(record) for suffix, record in found.items()}})
    return _combined(found)


def samples_of(prefix: str | None) -> str | None:
    """A quick look at the content of a pair of token files, for ranks to compare: two nodes may hold two copies."""
    if prefix is None:
        return None
    digest = hashlib.sha256()
    for suffix in _SUFFIXES:
        path = file_of(prefix, suffix)
        digest.update(f"{path.stat().st_size} {sampled_hash(path)} ".encode())
    return digest.hexdigest()


def check_identity(before: Identity | None, now: Identity, *, where: str, override: bool, is_known: bool) -> None:
    """A run goes on with the tokens and the tokenizer that it was begun with.

    Args:
        before: hashes that the run was begun with; None if it was begun before they were kept.
        now: hashes of what is there now.
        where: what was begun, for messages: a checkpoint or a run folder.
        override: checkpoint.override; nothing is refused.
        is_known: other facts vouch for the content when `before` is None.

    Raises:
        ConfigError: names what differs.
    """
    if override:
        return
    if before is None:
        if is_known:
            return
        raise ConfigError(
            f"data: {where} was made before content hashes were kept, so nothing tells whether the tokens are still "
            "the same; set checkpoint.override=true if you know that they are"
        )
    names = {
        "tokenizer": "the tokenizer is not that",
        "train": "the training tokens are not those",
        "validation": "the validation tokens are not those",
    }
    keep = {"tokenizer": "set data.tokenizer to the tokenizer.model of that run's folder to keep it"}
    for name, words in names.items():
        if before.get(name) != now.get(name):
            then, here = (str(identity.get(name) or "none")[:12] for identity in (before, now))
            remedy = keep.get(name, "bring the data back as it was")
            raise ConfigError(
                f"data: {words} of {where} (SHA-256 {then}, now {here}): the content changed under the "
                f"same name; {remedy}, or set checkpoint.override=true to go on with the new content"
            )
