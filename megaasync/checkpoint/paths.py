"""Checkpoint folders: step_00000100/, complete only with its mark, which names every file, its size and its checksum.

Needs no torch, so that listing and the checks before a start are quick.
"""

import itertools
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaasync.config.schema import ConfigError
from megaasync.observe.run_files import write_json

MARK, META = "COMPLETE.json", "megaasync.json"
TENSORS, PICKLED = "tensors.json", ".metadata"  # what tensors there are; the latter in checkpoints of before
_NAME = re.compile(r"step_(\d{8,})")
_BLOCK = 1 << 22


def folder_name(step: int) -> str:
    """Name of the folder of a step, as step_00000100."""
    return f"step_{step:08d}"


def tmp_dir_of(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return root / f".{folder_name(step)}.writing"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint folder. `is_complete`: it has its mark, and every file of it is there with its size."""

    path: Path
    step: int
    is_complete: bool
    problem: str


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return content if isinstance(content, dict) else None


def _read_mark(path: Path) -> dict[str, dict[str, int]] | str:
    """Size and CRC-32 of each file of a checkpoint by its mark, or what is wrong with the mark."""
    mark = _read_json(path / MARK)
    if mark is None or not isinstance(mark.get("files"), dict):
        return f"has no {MARK}: its save did not finish"
    files = mark["files"]
    is_sound = META in files and all(
        name == Path(name).name
        and isinstance(told, dict)
        and isinstance(told.get("size"), int)
        and isinstance(told.get("crc32"), int)
        for name, told in files.items()
    )
    # marks of before had no checksum of their own
    if not is_sound or mark.get("crc32", _crc_of(files)) != _crc_of(files):
        return f"{MARK} was changed after it was written (its checksum differs)"
    return files


def _crc_of(files: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def inspect_checkpoint(path: Path) -> Found:
    """Whether a folder is a whole checkpoint: by its mark, the sizes of its files, and the checksum of its JSON."""
    match = _NAME.fullmatch(path.name)
    step = int(match.group(1)) if match else -1
    if not path.is_dir():
        return Found(path, step, False, "no such folder")
    files = _read_mark(path)
    if isinstance(files, str):
        return Found(path, step, False, files)
    for name, told in files.items():
        try:
            status = (path / name).stat()
        except OSError:
            return Found(path, step, False, f"{name} is missing")
        if not stat.S_ISREG(status.st_mode):
            return Found(path, step, False, f"{name} is no regular file")
        if (size := status.st_size) != told["size"]:
            return Found(path, step, False, f"{name} has {size} bytes instead of {told['size']}")
    if checksum(path / META) != files[META]["crc32"]:  # before anything that it says is used
        return Found(path, step, False, f"{META} was changed after it was written (its checksum differs)")
    meta = _read_json(path / META)
    if meta is None or not isinstance(meta.get("step"), int):
        return Found(path, step, False, f"{META} cannot be read")
    if match and meta["step"] != step:
        return Found(path, step, False, f"is a checkpoint of step {meta['step']} under another name")
    return Found(path, meta["step"], True, "")


def checkpoints_in(root: Path) -> list[Found]:
    """All checkpoint folders below `root`, oldest first."""
    if not root.is_dir():
        return []
    return [inspect_checkpoint(path) for path in sorted(root.iterdir()) if _NAME.fullmatch(path.name) and path.is_dir()]


def latest(root: Path) -> Found | None:
    """The newest complete checkpoint below `root`."""
    complete = [found for found in checkpoints_in(root) if found.is_complete]
    return max(complete, key=lambda found: found.step, default=None)


def mark_of(path: Path) -> int | None:
    """CRC-32 over all checksums of a checkpoint: tells two of the same name apart. None if it is not whole."""
    files = _read_mark(path)
    return None if isinstance(files, str) else _crc_of(files)


def read_meta(path: Path) -> dict[str, Any]:
    """What a checkpoint says about itself.

    Raises:
        ConfigError: it is not a whole checkpoint.
    """
    found = inspect_checkpoint(path)
    if not found.is_complete:
        raise ConfigError(f"checkpoint {path}: {found.problem}; python -m megaasync.checkpoint list shows whole ones")
    return _read_json(path / META)


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finish(tmp_dir: Path, final: Path, sums: dict[str, int]) -> None:
    """Give a folder whose files are all written its name, and then its mark, durably.

    Args:
        tmp_dir: the folder.
        final: its name to be; what is there goes when the new one is whole.
        sums: checksums by file name.
    """
    files = {name: {"size": (tmp_dir / name).stat().st_size, "crc32": crc} for name, crc in sorted(sums.items())}
    for name in files:
        _sync(tmp_dir / name)
    _sync(tmp_dir)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    tmp_dir.rename(final)
    _sync(final.parent)
    write_json(final / MARK, {"files": files, "crc32": _crc_of(files)})
    _sync(final / MARK)
    _sync(final)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_older(root: Path, *, keep: int) -> list[Path]:
    """Delete complete checkpoints but the newest `keep`; the mark goes first, so that none is half there.

    Returns:
        Those that could not be removed.
    """
    left = []
    complete = [found for found in checkpoints_in(root) if found.is_complete]
    for found in sorted(complete, key=lambda checkpoint: checkpoint.step)[:-keep]:
        try:
            (found.path / MARK).unlink(missing_ok=True)
            shutil.rmtree(found.path)
        except OSError:
            left.append(found.path)
    return left


def remove_leftovers(root: Path) -> None:
    """Delete what saves that did not finish have left; only with the run folder locked.

    A checkpoint that one of the same step was about to replace comes back.
    """
    if not root.is_dir():
        return
    for path in root.glob(".step_*.replaced"):
        final = root / path.name[1 : -len(".replaced")]
        if not inspect_checkpoint(final).is_complete:
            shutil.rmtree(final, ignore_errors=True)
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".step_*.writing"):
        shutil.rmtree(path, ignore_errors=True)


def quarantine(path: Path, why: str) -> Path:
    """Rename a checkpoint so that it no longer counts; nothing of it is deleted.

    Returns:
        Its new place, `WHY_step_...`, numbered if that is taken.
    """
    names = itertools.chain([f"{why}_{path.name}"], (f"{why}_{path.name}_{n}" for n in itertools.count(2)))
    renamed = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(renamed)
    return renamed


def set_aside_newer(root: Path, step: int) -> None:
    """Take checkpoints above `step` out of the way of a run that goes on from there; nothing of them is deleted."""
    for found in checkpoints_in(root):
        if found.step > step:
            quarantine(found.path, "abandoned")


def wrong_files(path: Path, *, part: int = 0, parts: int = 1) -> Iterable[str]:
    """What is wrong with a checkpoint's files by their checksums; reads all of them, or one part of several."""
    found = inspect_checkpoint(path)
    if not found.is_complete:
        yield found.problem
        return
    files = sorted(_read_mark(path).items())
    for name, told in files[part::parts]:
        if checksum(path / name) != told["crc32"]:
            yield f"{name} was changed after it was written (its checksum differs)"
