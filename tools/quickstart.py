"""The main job three times: 1f1b, 2bw, and 2bw with error feedback, then one table and one page that compare them."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megaasync.observe.report import Curve, render_curves, render_page, render_table, show
from megaasync.observe.run_files import read_metrics, write_text

RUNS = {
    "1f1b": ["schedule=1f1b"],
    "2bw": ["schedule=2bw"],
    "2bw + error feedback": ["schedule=2bw", "correction=error_feedback"],
}


def run_one(label: str, overrides: list[str], folder: Path, extra: list[str]) -> dict[str, Any]:
    """Train once, as a user would from the command line, and read its summary."""
    print(
        f"\n=== {label}: python -m megaasync.pretrain experiment=quickstart {' '.join([*overrides, *extra])}",
        flush=True,
    )
    command = [sys.executable, "-m", "megaasync.pretrain", "experiment=quickstart", *overrides, *extra]
    status = subprocess.run([*command, f'run.dir="{folder}"'], check=False).returncode
    if status != 0:
        raise SystemExit(status)
    return json.loads((folder / "summary.json").read_text())


def compare(summaries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per run."""
    base = summaries["1f1b"]["tokens_per_second"]
    return [
        {
            "run": label,
            "validation loss": summary["val_loss"],
            "tokens/s": summary["tokens_per_second"],
            "x 1f1b": summary["tokens_per_second"] / base,
            "bubble measured": summary["bubble_measured"],
            "bubble planned": summary["bubble_planned"],
        }
        for label, summary in summaries.items()
    ]


def write_page(rows: list[dict[str, Any]], folders: dict[str, Path], path: Path) -> None:
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
                ("Result", render_table(rows)),
                ("Loss", f'<div style="max-width:720px">{drawing}</div>'),
                ("Runs, each with its timeline", f"<ul>{links}</ul>"),
            ],
        ),
    )


def main() -> None:
    """Run, compare, print; arguments are further overrides for all three runs."""
    extra = sys.argv[1:]
    folder = Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")  # which the first run makes
    folders = {label: folder / label.replace(" + ", "-").replace(" ", "_") for label in RUNS}
    summaries = {label: run_one(label, RUNS[label], folders[label], extra) for label in RUNS}
    rows = compare(summaries)
    table = Table(title="Same model, seed, data and steps; 2 stages")
    for key in rows[0]:
        table.add_column(key, justify="left" if key == "run" else "right")
    for row in rows:
        table.add_row(*(show(value) for value in row.values()))
    print()
    Console(width=110).print(table)
    write_page(rows, folders, folder / "report.html")
    print(f"report: {(folder / 'report.html').resolve()}")


if __name__ == "__main__":
    main()
