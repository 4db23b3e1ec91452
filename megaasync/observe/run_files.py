"""The run folder's machine-readable files: metrics.jsonl line by line, the others whole or not at all."""

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from megaasync.config.schema import ConfigError

_LOOK_SECONDS = 1.0  # between two looks at whether the run folder is still where it was


def _plain(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file aside and rename it."""
    write_text(path, json.dumps(_plain(content), indent=2, allow_nan=False) + "\n")


def copy_whole(source: Path, path: Path) -> None:
    """Copy a file aside and rename it, unless the same content is there already."""
    content = source.read_bytes()
    if path.exists() and path.read_bytes() == content:
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(content)
    aside.rename(path)


def write_text(path: Path, content: str) -> None:
    """Write a text file aside and rename it."""
    write_lines(path, [content])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file line by line aside and rename it; it keeps the mode of the file that it replaces."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w") as file:
        file.writelines(lines)
    with suppress(FileNotFoundError):
        aside.chmod(stat.S_IMODE(path.stat().st_mode))
    aside.rename(path)


class FolderLost(ConfigError):
    """The run folder was renamed or removed under the run."""


def _key_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class MetricsFile:
    """Appends rows to metrics.jsonl; every row is complete on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - lives as long as the run
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # the folder itself, whatever its name is
        self._looked = monotonic()

    def _look_for_the_folder(self) -> None:
        """Once a second: a run must not go on for days in a folder that nobody finds.

        Raises:
            FolderLost: the folder's name is gone, or leads to another folder.
        """
        if monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = monotonic()
        try:
            is_there = _key_of(os.stat(self._path.parent)) == _key_of(os.fstat(self._folder))
        except FileNotFoundError:
            is_there = False
        if is_there:
            return
        now = os.readlink(f"/proc/self/fd/{self._folder}")
        what = "removed" if now.endswith(" (deleted)") else f"renamed to {now}"
        remedy = (
            "begin it again" if now.endswith(" (deleted)") else f"go on from its last checkpoint with run.dir={now}"
        )
        raise FolderLost(f"run.dir={self._path.parent}: the folder was {what} while the run worked in it; {remedy}")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one JSON object as a line.

        Raises:
            OSError: names the file.
            FolderLost: the run folder is no longer where it was.
        """
        self._look_for_the_folder()
        try:
            self._file.write(json.dumps(_plain(row), allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        """Close the file."""
        os.close(self._folder)
        self._file.close()


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The complete rows of a metrics.jsonl, one at a time; none if it is not there."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that was killed


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a metrics.jsonl; none if it is not there."""
    return list(iterate_metrics(path))


def thinned_metrics(path: Path, *, most: int) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, of the train rows every n-th only: at most `most` of them, and the last.

    A run of a million steps has a gigabyte of rows; what draws them has no use for more than can be seen.
    """
    total = sum(row.get("kind") == "train" for row in iterate_metrics(path))
    every = max(-(-total // most), 1)
    kept, number = [], 0
    for row in iterate_metrics(path):
        if row.get("kind") != "train":
            kept.append(row)
            continue
        number += 1
        if number % every == 1 % every or number == total:
            kept.append(row)
    return kept
