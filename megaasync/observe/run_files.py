"""The run folder's machine-readable files: metrics.jsonl line by line, the others whole or not at all."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _plain(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file aside and rename it."""
    write_text(path, json.dumps(_plain(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, content: str) -> None:
    """Write a text file aside and rename it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(content)
    aside.rename(path)


class MetricsFile:
    """Appends rows to metrics.jsonl; every row is complete on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - lives as long as the run

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one JSON object as a line.

        Raises:
            OSError: names the file.
        """
        try:
            self._file.write(json.dumps(_plain(row), allow_nan=False) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a metrics.jsonl."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
    return rows
