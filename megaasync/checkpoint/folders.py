"""Checkpoint folders: step_00000100/, complete only with its mark, which names every file, its size and its checksum.

Needs no torch, so that listing and the checks before a start are quick.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaasync.config.schema import ConfigError
from megaasync.observe.run_files import write_json

MARK, META = "COMPLETE.json", "megaasync.json"
_NAME = re.compile(r"step_(\d{8,})")
_BLOCK = 1 << 22


def folder_name(step: int) -> str:
    """step_00000100."""
    return f"step_{step:08d}"


def aside_of(root: Path, step: int) -> Path:
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


def look_at(path: Path) -> Found:
    """Whether a folder is a whole checkpoint, by its mark and the sizes of its files."""
    match = _NAME.fullmatch(path.name)
    meta = _read_json(path / META)
    step = int(match.group(1)) if match else (meta or {}).get("step", -1)
    if not path.is_dir():
        return Found(path, step, False, "no such folder")
    mark = _read_json(path / MARK)
    if mark is None or not isinstance(mark.get("files"), dict):
        return Found(path, step, False, f"has no {MARK}: its save did not finish")
    for name, told in mark["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return Found(path, step, False, f"{name} is missing")
        if size != told["size"]:
            return Found(path, step, False, f"{name} has {size} bytes instead of {told['size']}")
    if meta is None:
        return Found(path, step, False, f"{META} cannot be read")
    return Found(path, step, True, "")


def checkpoints_in(root: Path) -> list[Found]:
    """All checkpoint folders below `root`, oldest first."""
    if not root.is_dir():
        return []
    return [look_at(path) for path in sorted(root.iterdir()) if _NAME.fullmatch(path.name) and path.is_dir()]


def newest(root: Path) -> Found | None:
    """The newest complete checkpoint below `root`."""
    complete = [found for found in checkpoints_in(root) if found.is_complete]
    return max(complete, key=lambda found: found.step, default=None)


def read_meta(path: Path) -> dict[str, Any]:
    """What a checkpoint says about itself.

    Raises:
        ConfigError: it is not a whole checkpoint.
    """
    found = look_at(path)
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


def finish(aside: Path, final: Path, sums: dict[str, int]) -> None:
    """Give a folder whose files are all written its name, and then its mark, durably.

    Args:
        aside: the folder.
        final: its name to be; what is there goes when the new one is whole.
        sums: checksums by file name.
    """
    files = {name: {"size": (aside / name).stat().st_size, "crc32": crc} for name, crc in sorted(sums.items())}
    for name in files:
        _sync(aside / name)
    _sync(aside)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    _sync(final.parent)
    write_json(final / MARK, {"files": files})
    _sync(final / MARK)
    _sync(final)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_older(root: Path, *, keep: int) -> None:
    """Delete complete checkpoints but the newest `keep`; the mark goes first, so that none is half there."""
    complete = [found for found in checkpoints_in(root) if found.is_complete]
    for found in sorted(complete, key=lambda one: one.step)[:-keep]:
        (found.path / MARK).unlink(missing_ok=True)
        shutil.rmtree(found.path, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Delete what saves that did not finish have left; only with the run folder locked.

    A checkpoint that one of the same step was about to replace comes back.
    """
    if not root.is_dir():
        return
    for path in root.glob(".step_*.replaced"):
        final = root / path.name[1 : -len(".replaced")]
        if not look_at(final).is_complete:
            shutil.rmtree(final, ignore_errors=True)
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".step_*.writing"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside_newer(root: Path, step: int) -> None:
    """Take checkpoints above `step` out of the way of a run that goes on from there; nothing of them is deleted."""
    for found in checkpoints_in(root):
        if found.step > step:
            aside = found.path.with_name(f"abandoned_{found.path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            found.path.rename(aside)


def wrong_files(path: Path, *, part: int = 0, parts: int = 1) -> Iterable[str]:
    """What is wrong with a checkpoint's files by their checksums; reads all of them, or one part of several."""
    found = look_at(path)
    if not found.is_complete:
        yield found.problem
        return
    files = sorted(_read_json(path / MARK)["files"].items())
    for name, told in files[part::parts]:
        if checksum(path / name) != told["crc32"]:
            yield f"{name} was changed after it was written (its checksum differs)"
