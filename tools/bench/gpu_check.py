"""What a GPU has to show: correctness of each backend, Muon's step, MFU, memory, overlap, and a delay comparison.

    python tools/gpu_check.py [--cpu] [out=runs/gpu_check] [minutes=8] [only=CHECK]

One process, one device, no download; it needs this repository, numpy and a PyTorch of 2.11 or newer, and nothing else.
Prints one table, and writes it as gpu_check.json into the folder. A check that fails or for which no time is left is
said, and does not stop the others; the last one takes what time is left. --cpu runs the same at toy size.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from .line import Line


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


Checks = Mapping[str, tuple[Callable[[Any], Iterator[Line]], float]]


def read_arguments(arguments: list[str], checks: Checks) -> tuple[bool, Path, float, str | None]:
    """Whether on the CPU, the folder, the minutes, and the only check that is wanted."""
    given = {"out": "runs/gpu_check", "minutes": "8", "only": None}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument == "--cpu":
            continue
        if not equals or key not in given:
            _fail(f"{argument}: unknown; give --cpu, out=FOLDER, minutes=NUMBER or only=CHECK")
        given[key] = value
    try:
        minutes = float(given["minutes"])
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        _fail(f"minutes={given['minutes']}: must be a number above 0")
    if given["only"] is not None and given["only"] not in checks:
        _fail(f"only={given['only']}: unknown check; choose {', '.join(checks)}")
    return "--cpu" in arguments, Path(given["out"]), minutes, given["only"]


def run_checks(place: Any, checks: Checks, only: str | None) -> dict[str, list[Line]]:
    """All checks in order, or one; lines are printed as they come."""
    found: dict[str, list[Line]] = {}
    for name, (check, seconds) in checks.items():
        if only is not None and name != only:
            continue
        lines, start = found.setdefault(name, []), perf_counter()
        print(f"-- {name}", flush=True)
        try:
            left = place.deadline - start
            if place.is_gpu and left < seconds:
                lines.append(Line(name, f"skipped: {left:.0f} s left, it takes about {seconds}"))
            else:
                for line in check(place):
                    lines.append(line)
                    print(f"   {line.name}: {line.value}", flush=True)
        except Exception as error:
            traceback.print_exc()
            lines.append(Line(name, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}", "", False))
        place.synchronize()
        print(f"   ({perf_counter() - start:.0f} s)", flush=True)
    return found


def table(found: dict[str, list[Line]]) -> str:
    """Markdown."""
    rows = ["| check | measured | goal | met |", "| --- | --- | --- | --- |"]
    met = {True: "yes", False: "NO", None: ""}
    rows += [
        f"| {line.name.strip()} | {line.value} | {line.goal} | {met[line.is_met]} |"
        for lines in found.values()
        for line in lines
    ]
    return "\n".join(rows)


def main() -> None:
    """Entry point."""
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        print(__doc__)
        return
    checks = importlib.import_module(".gpu_checks", __package__)
    on_cpu, out, minutes, only = read_arguments(sys.argv[1:], checks.CHECKS)
    if not on_cpu and not torch.cuda.is_available():
        _fail("torch sees no CUDA device; run it on a GPU, or at toy size with --cpu")
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", 0)
    start = perf_counter()
    place = checks.Place(device, out, start + 60 * minutes)
    found = run_checks(place, checks.CHECKS, only)
    text = table(found)
    print(f"\n{text}\n\n{perf_counter() - start:.0f} s; written to {out / 'gpu_check.json'}")
    lines = {name: [asdict(line) for line in lines] for name, lines in found.items()}
    (out / "gpu_check.json").write_text(json.dumps({"device": str(device), "checks": lines}, indent=1) + "\n")
    if any(line.is_met is False and line.value.startswith("failed") for lines in found.values() for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
