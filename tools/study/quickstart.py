"""The main job three times, in rounds: 1f1b, 2bw, 2bw with error feedback; a table and a page compare them."""

import json
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from megaasync.observe.report import Curve, render_curves, render_page, render_table, show
from megaasync.observe.run_files import read_metrics, write_text

from ..command_line import compose_plain, one_message

_ROUNDS, _FEWEST_STEPS = 3, 20  # of a run, and of a round
_STEADY = 1.25  # most over least ratio of rounds that agree

RUNS = {
    "1f1b": ["schedule=1f1b"],
    "2bw": ["schedule=2bw"],
    "2bw + error feedback": ["schedule=2bw", "correction=error_feedback"],
}


def run_part(label: str, overrides: list[str], folder: Path, *, steps: int, total: int) -> dict[str, Any]:
    """Train to so many steps, as a user would from the command line, and read the summary.

    Args:
        label: of the run.
        overrides: of all its parts.
        folder: of the run, which goes on where the part before has ended.
        steps: where this part ends.
        total: of the whole run, over which the learning rate's schedule goes.
    """
    own = [f"train.steps={steps}", f"train.lr_schedule_steps={total}"]
    words = ["-m", "megaasync.pretrain", "experiment=quickstart", *overrides, *own]
    print(f"\n=== {label}: python {' '.join(words)}", flush=True)
    status = subprocess.run([sys.executable, *words, f'run.dir="{folder}"'], check=False).returncode
    if status != 0:
        raise SystemExit(status)
    return json.loads((folder / "summary.json").read_text())


def ends_of_rounds(steps: int) -> list[int]:
    """Where the parts of a run end: three, if there is something to measure in each."""
    rounds = max(min(_ROUNDS, steps // _FEWEST_STEPS), 1)
    return [steps * (number + 1) // rounds for number in range(rounds)]


def ratios(rates: dict[str, list[float]], label: str) -> list[float]:
    """Throughput over 1f1b's, round by round: what else ran on the machine in a round slowed both."""
    return [mine / base if base else 0.0 for mine, base in zip(rates[label], rates["1f1b"], strict=True)]


def show_ratio(values: list[float]) -> str:
    """Median, and from the least to the most."""
    middle = f"{median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def compare(summaries: dict[str, dict[str, Any]], rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per run."""
    return [
        {
            "run": label,
            "validation loss": summary["val_loss"],
            "tokens/s": median(rates[label]),
            "x 1f1b": show_ratio(ratios(rates, label)),
            "bubble measured": summary["bubble_measured"],
            "bubble planned": summary["bubble_planned"],
        }
        for label, summary in summaries.items()
    ]


def conclusion(rates: dict[str, list[float]]) -> str:
    """What the numbers bear, and what they do not."""
    losses = (
        "Losses: the same model, data and seed, a few hundred thousand tokens; all three train, and which one "
        "is better only more seeds show (docs/optimizers.md)."
    )
    if any(not all(values) for values in rates.values()) or len(rates["1f1b"]) < 2:
        return f"{losses}\nSpeed: too few steps to say anything; give more with train.steps."
    found = ratios(rates, "2bw")
    low, high = min(found), max(found)
    if low > 1 and high / low < _STEADY:
        speed = f"2bw was faster than 1f1b in each of {len(found)} alternated rounds, {low:.2f} to {high:.2f} times."
    elif low > 1:
        speed = (
            f"2bw was faster than 1f1b in all {len(found)} alternated rounds, but by {low:.2f} to {high:.2f} times; "
            "the machine did something else too, so take the direction from this and not the size."
        )
    else:
        speed = (
            f"the {len(found)} alternated rounds disagree ({low:.2f} to {high:.2f}): the machine was busy with "
            "something else; nothing about speed follows from this run. Repeat it on a quiet machine."
        )
    return f"{losses}\nSpeed: {speed}"


def write_page(rows: list[dict[str, Any]], folders: dict[str, Path], path: Path, *, words: str) -> None:
    """The comparison as a self-contained page."""
    curves = []
    for label, folder in folders.items():
        train = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
        curves.append(Curve(label, [(row["step"], row["loss"]) for row in train]))
    drawing = render_curves(curves, title="training loss", x_label="step", y_label="nats per token")
    links = "".join(f'<li><a href="{folder.name}/report.html">{label}</a></li>' for label, folder in folders.items())
    write_text(
        path,
        render_page(
            title="megaasync quickstart: flushed and asynchronous pipeline",
            sections=[
                ("Result", render_table(rows) + "".join(f"<p>{escape(line)}</p>" for line in words.splitlines())),
                ("Loss", f'<div style="max-width:720px">{drawing}</div>'),
                ("Runs, each with its timeline", f"<ul>{links}</ul>"),
            ],
        ),
    )


def main() -> None:
    """Run in alternated rounds, compare, print; arguments are further overrides for all three runs."""
    extra = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in extra):
        print(f"{__doc__}\n\nusage: python -m tools.study.quickstart [key=value ...], as for megaasync.pretrain")
        return
    with one_message():
        total = compose_plain(["experiment=quickstart", *extra])["train"]["steps"]
        extra = [argument for argument in extra if not argument.startswith("train.steps=")]
        folder = Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")  # which the first run makes
        folders = {label: folder / label.replace(" + ", "-").replace(" ", "_") for label in RUNS}
        rates: dict[str, list[float]] = {label: [] for label in RUNS}
        summaries: dict[str, dict[str, Any]] = {}
        for number, steps in enumerate(ends_of_rounds(total)):
            labels = list(RUNS) if number % 2 == 0 else list(reversed(RUNS))
            for label in labels:
                told = run_part(label, [*RUNS[label], *extra], folders[label], steps=steps, total=total)
                rates[label].append(told["tokens_per_second"] or 0.0)
                summaries[label] = told
        rows, words = compare({label: summaries[label] for label in RUNS}, rates), conclusion(rates)
        table = Table(title="Same model, seed, data and steps; 2 stages")
        for key in rows[0]:
            table.add_column(key, justify="left" if key == "run" else "right")
        for row in rows:
            table.add_row(*(show(value) for value in row.values()))
        print()
        Console(width=118).print(table)
        print(words)
        write_page(rows, folders, folder / "report.html", words=words)
        print(f"report: {(folder / 'report.html').resolve()}")


if __name__ == "__main__":
    main()
