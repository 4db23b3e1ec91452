"""What a benchmark shows: a table, a CSV file and a picture."""

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from .case import Case, Measured

mpl.use("Agg")

from matplotlib import pyplot

from megaasync.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class Line:
    """One case's measurements, one per round, with what was planned.

    Attributes:
        rounds: in the order in which they were made; the rounds of all lines are alternated.
        planned: by the simulator; None for torch's schedules.
        tokens: per step; microbatches if they are emulated.
    """

    case: Case
    rounds: list[Measured]
    planned: Measured | None
    tokens: int

    @property
    def is_synchronous(self) -> bool:
        """Whether it has no delay."""
        return self.case.engine == "torch" or not SCHEDULES[self.case.schedule].has_delay


@dataclass(frozen=True, slots=True)
class Ratios:
    """A line's throughput over others', medians of the rounds' ratios."""

    to_torch_1f1b: float | None
    to_best_synchronous: float | None
    ideal_to_1f1b: float | None


def ratios_of(line: Line, lines: Sequence[Line]) -> Ratios:
    """Compare a line with torch's 1F1B, and with the synchronous line of the best median."""

    def over(other: Line) -> float:
        pairs = zip(other.rounds, line.rounds, strict=True)
        return statistics.median(theirs.period / ours.period for theirs, ours in pairs)

    def find(engine: str, schedule: str) -> Line | None:
        return next((row for row in lines if (row.case.engine, row.case.schedule) == (engine, schedule)), None)

    torch_1f1b, plain = find("torch", "Schedule1F1B"), find("megaasync", "1f1b")
    best = min((row for row in lines if row.is_synchronous), key=median_period, default=None)
    ideal = None if plain is None or line.planned is None else plain.planned.period / line.planned.period
    return Ratios(*(None if other is None else over(other) for other in (torch_1f1b, best)), ideal)


def median_period(line: Line) -> float:
    """Seconds per step."""
    return statistics.median(measured.period for measured in line.rounds)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def rows_of(lines: Sequence[Line]) -> list[dict[str, object]]:
    """The figures of one setting, as the CSV has them."""
    rows = []
    for line in lines:
        ratios = ratios_of(line, lines)
        period = median_period(line)
        bubbles = [measured.bubble for measured in line.rounds if measured.bubble is not None]
        bubble = statistics.median(bubbles) if bubbles else None
        rows.append(
            {
                "engine": line.case.engine,
                "schedule": line.case.label.removeprefix(f"{line.case.engine} "),
                "ranks": line.case.num_ranks,
                "microbatches": line.case.num_microbatches,
                "seconds_per_step": round(period, 5),
                "tokens_per_second": round(line.tokens / period, 1),
                "bubble": _rounded(bubble),
                "bubble_planned": None if line.planned is None else _rounded(line.planned.bubble),
                "over_torch_1f1b": _rounded(ratios.to_torch_1f1b),
                "over_best_synchronous": _rounded(ratios.to_best_synchronous),
                "planned_over_1f1b": _rounded(ratios.ideal_to_1f1b),
                "rounds": len(line.rounds),
            }
        )
    return rows


def print_table(title: str, rows: Sequence[dict[str, object]], *, unit: str) -> None:
    """The figures for people; `unit` is what a step has so many of: tokens, or microbatches if they are emulated."""
    table = Table(title=title, title_justify="left")
    heads = {
        "engine": "engine",
        "schedule": "schedule",
        "tokens_per_second": f"{unit}/s",
        "bubble": "bubble",
        "bubble_planned": "planned",
        "over_torch_1f1b": "x torch 1F1B",
        "planned_over_1f1b": "planned x 1f1b",
        "over_best_synchronous": "x best synchronous",
    }
    for name, head in heads.items():
        table.add_column(head, justify="left" if name in ("engine", "schedule") else "right")
    for row in rows:
        cells = ["-" if row[name] is None else row[name] for name in heads]
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) and cell < 100 else str(cell) for cell in cells))
    Console(width=140, highlight=False).print(table)


def write_csv(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """All rows of all settings."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue())


def write_png(path: Path, settings: Sequence[tuple[str, list[dict[str, object]]]]) -> None:
    """One panel per setting: tokens per second over the best synchronous schedule's."""
    height = max(len(rows) for _, rows in settings)
    figure, axes = pyplot.subplots(
        1, len(settings), figsize=(1 + 5.4 * len(settings), 1.6 + 0.36 * height), squeeze=False, layout="constrained"
    )
    colors = {"torch": "#9aa5b1", "synchronous": "#5b8db8", "asynchronous": "#d8733c"}
    for axis, (title, rows) in zip(axes[0], settings, strict=True):
        kinds = [
            "torch"
            if row["engine"] == "torch"
            else "asynchronous"
            if SCHEDULES[str(row["schedule"]).split(" (")[0]].has_delay
            else "synchronous"
            for row in rows
        ]
        fastest = max(float(row["tokens_per_second"]) for row in rows)
        has_best = all(row["over_best_synchronous"] is not None for row in rows)
        values = [
            float(row["over_best_synchronous"] if has_best else row["tokens_per_second"]) / (1 if has_best else fastest)
            for row in rows
        ]
        places = range(len(rows))
        axis.barh(places, values, color=[colors[kind] for kind in kinds])
        axis.set_yticks(places, [str(row["schedule"]).replace("Schedule", "") for row in rows], fontsize=9)
        for place, value in zip(places, values, strict=True):
            axis.text(value + 0.01, place, f"{value:.2f}", va="center", fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1.0, color="#333", linewidth=0.8)
        axis.set_xlim(0, max(values) * 1.15)
        axis.set_xlabel(f"throughput, {'best synchronous' if has_best else 'fastest'} schedule = 1")
        axis.set_title(title, fontsize=10, loc="left")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    labels = ["torch.distributed.pipelining", "megaasync, synchronous", "megaasync, asynchronous"]
    columns = 3 if len(settings) > 1 else 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
