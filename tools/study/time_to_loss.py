"""Wall-clock time to the synchronous run's loss: steps needed (study=time_to_loss) times measured throughput.

    python -m tools.study.time_to_loss [study=runs/study/time_to_loss] [rounds=5] [steps=150] [key=value ...]

Throughput is that of `python -m megaasync.pretrain experiment=delay_study parallel.pipeline=2` under 1f1b, 2bw and 2bw
with error feedback, in rounds whose order turns, on this machine; nothing else should run. Prints a table and writes
time_to_loss.md and time_to_loss.json beside the study's results.
"""

import csv
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaasync.config import ConfigError
from megaasync.entry.text_values import load_yaml
from megaasync.observe.run_files import write_json, write_text

from ..command_line import one_message, read_pairs, wants_help

_OVERRIDES = {  # by the study's names of its modes
    "sync": ("schedule=1f1b",),
    "delayed": ("schedule=2bw",),
    "delayed + EF": ("schedule=2bw", "correction=error_feedback"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What to compare.

    Attributes:
        study: folder of `delay_study.py study=time_to_loss`.
        rounds: alternated measurements of throughput.
        steps: of each measurement.
        microbatches: m, per step, of the experiment's 4 sequences.
        overrides: further ones of each measurement.
    """

    study: str = "runs/study/time_to_loss"
    rounds: int = 5
    steps: int = 150
    microbatches: int = 2
    overrides: tuple[str, ...] = ()


def losses_of(path: Path) -> dict[tuple[str, str], dict[float, float]]:
    """By (optimizer, mode): mean loss over the seeds by steps over the synchronous run's."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            by_steps = found.setdefault((row["optimizer"], row["mode"]), {})
            if not row["variation"]:
                raise ConfigError(f"{path}: not of study=time_to_loss, whose variations are numbers of steps")
            by_steps.setdefault(float(row["variation"]), []).append(float(row["val_loss"]))
    return {key: {f: statistics.fmean(v) for f, v in by_steps.items()} for key, by_steps in found.items()}


def steps_to(target: float, losses: dict[float, float]) -> float | None:
    """Steps, over the synchronous run's, at which the loss is `target`, linear between runs.

    None if no run is that good; the fewest if all are.
    """
    points = sorted((few, loss) for few, loss in losses.items() if math.isfinite(loss))
    if not points:
        return None
    if points[0][1] <= target:
        return points[0][0]
    for (few, high), (many, low) in itertools.pairwise(points):
        if low <= target:
            return few + (many - few) * (high - target) / (high - low)
    return None


def _tokens_per_second(mode: str, options: Options, folder: Path) -> float:
    command = [
        *(sys.executable, "-m", "megaasync.pretrain", "experiment=delay_study", *_OVERRIDES[mode]),
        *("parallel.pipeline=2", f"train.micro_batch_size={4 // options.microbatches}", "device=cpu"),
        *(f"train.steps={options.steps}", "train.warmup_steps=0", "train.eval_sequences=2", *options.overrides),
    ]
    done = subprocess.run([*command, f'run.dir="{folder}"'], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ConfigError(f"the measurement failed: {lines[-1].removeprefix('error: ')}")
    return json.loads((folder / "summary.json").read_text())["tokens_per_second"]


def measure(options: Options) -> list[dict[str, float]]:
    """Tokens/s of each mode, per round, in turns."""
    rounds, modes = [], tuple(_OVERRIDES)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.rounds):
            turn = number % len(modes)
            order = (*modes[turn:], *modes[:turn])
            one = {mode: _tokens_per_second(mode, options, Path(scratch) / f"{number}-{mode}") for mode in order}
            print(
                f"round {number + 1}/{options.rounds}: "
                + ", ".join(f"{mode} {one[mode]:,.0f} tokens/s" for mode in modes),
                flush=True,
            )
            rounds.append(one)
    return rounds


@dataclass(frozen=True, slots=True)
class Speedup:
    """Throughput over synchronous 1f1b's: over the rounds, the median, least and most."""

    median: float
    least: float
    most: float


def speedups_of(rounds: Sequence[dict[str, float]]) -> dict[str, Speedup]:
    """By mode."""
    found = {}
    for mode in _OVERRIDES:
        ratios = [seconds[mode] / seconds["sync"] for seconds in rounds]
        found[mode] = Speedup(statistics.median(ratios), min(ratios), max(ratios))
    return found


def table(
    losses: dict[tuple[str, str], dict[float, float]], speedups: dict[str, Speedup]
) -> tuple[str, list[dict[str, Any]]]:
    """Markdown and rows."""
    lines = [
        "| optimizer | mode | steps needed, over sync's | throughput over 1f1b (least to most) "
        "| time to sync's loss, over sync's (least to most) |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = []
    for (optimizer, mode), by_steps in losses.items():
        target = losses[(optimizer, "sync")][1.0]
        if mode == "sync":
            continue
        needed, speedup = steps_to(target, by_steps), speedups[mode]
        time = None if needed is None else needed / speedup.median
        rows.append({"optimizer": optimizer, "mode": mode, "steps": needed, "speedup": speedup.median, "time": time})
        most = max(by_steps)
        count = most if needed is None else needed
        more = "more than " if needed is None else ""
        lines.append(
            f"| {optimizer} | {mode} | {more}{count:.3f} | {speedup.median:.3f} ({speedup.least:.3f} to "
            f"{speedup.most:.3f}) | {more}{count / speedup.median:.3f} ({count / speedup.most:.3f} to "
            f"{count / speedup.least:.3f}) |"
        )
    return "\n".join(lines) + "\n", rows


def read_arguments(arguments: Sequence[str]) -> Options:
    """The command line.

    Raises:
        ConfigError: names key, value and remedy.
    """
    options = read_pairs(
        Options,
        list(arguments),
        parse=lambda key, value: load_yaml(f"[{value}]") if key == "overrides" else load_yaml(value),
    )
    for key, least in (("rounds", 1), ("steps", 10)):
        if getattr(options, key) < least:
            raise ConfigError(f"{key}={getattr(options, key)}: must be at least {least}")
    if options.microbatches not in (1, 2, 4):
        raise ConfigError(f"microbatches={options.microbatches}: must divide the experiment's 4 sequences: 1, 2 or 4")
    if not (Path(options.study) / "results.csv").exists():
        raise ConfigError(
            f"study={options.study}: no results.csv there; run python tools/delay_study.py study=time_to_loss first"
        )
    return options


def main() -> None:
    """Entry point."""
    if wants_help(Options, __doc__):
        return
    with one_message():
        options = read_arguments(sys.argv[1:])
        folder = Path(options.study)
        losses = losses_of(folder / "results.csv")
        rounds = measure(options)
        text, rows = table(losses, speedups_of(rounds))
        print("\n" + text)
        write_text(folder / "time_to_loss.md", text)
        write_json(folder / "time_to_loss.json", {"rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
