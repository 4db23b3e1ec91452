"""What a study's runs say: means over seeds, gaps to the first mode, tables."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaasync.observe.run_files import write_text

from .design import Run, StudyConfig
from .runner import Result


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers of several seeds.

    Attributes:
        values: one per seed; inf for a run that diverged.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds, 0 for one seed."""
        finite = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) if finite else 0.0

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            lost = sum(not math.isfinite(value) for value in self.values)
            return f"diverged ({lost} of {len(self.values)})"
        return f"{self.mean:.4f} ± {self.deviation:.4f}" if len(self.values) > 1 else f"{self.mean:.4f}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One optimizer under one variation and lr, in all modes.

    Attributes:
        losses: by mode.
        gaps: of every mode but the first, to the first, seed by seed.
    """

    optimizer: str
    variation: str
    lr: float
    losses: dict[str, Sample]
    gaps: dict[str, Sample]


def cells_of(study: StudyConfig, results: Sequence[Result]) -> list[Cell]:
    """The results by optimizer, variation and lr, in the order of the study; only what is complete."""
    by_key: dict[tuple, dict[str, dict[int, float]]] = {}
    for result in results:
        run = result.run
        modes = by_key.setdefault((run.variation, run.optimizer, run.lr), {})
        modes.setdefault(run.mode, {})[run.seed] = result.val_loss
    cells = []
    for (variation, optimizer, lr), modes in by_key.items():
        losses = {mode: Sample(tuple(values[seed] for seed in sorted(values))) for mode, values in modes.items()}
        first, *others = study.modes
        base = modes.get(first, {})
        gaps = {
            mode: Sample(tuple(modes[mode][seed] - base[seed] for seed in sorted(base)))
            for mode in others
            if mode in modes and base and modes[mode].keys() == base.keys()
        }
        cells.append(Cell(optimizer, variation, lr, losses, gaps))
    order = list(study.optimizers), list(study.variations or {"": {}})
    return sorted(cells, key=lambda cell: (order[0].index(cell.optimizer), order[1].index(cell.variation), cell.lr))


def chosen_lrs(cells: Sequence[Cell], mode: str) -> dict[str, tuple[float, bool]]:
    """By optimizer: (the lr with the least mean loss in that mode, whether it lies inside the grid)."""
    chosen = {}
    for optimizer in dict.fromkeys(cell.optimizer for cell in cells):
        mine = sorted((cell for cell in cells if cell.optimizer == optimizer), key=lambda cell: cell.lr)
        best = min(mine, key=lambda cell: cell.losses[mode].mean)
        chosen[optimizer] = best.lr, best not in (mine[0], mine[-1])
    return chosen


def _closed(cell: Cell, modes: Sequence[str]) -> str:
    """Share of the second mode's gap that the third one closes."""
    plain, corrected = (cell.gaps.get(mode) for mode in modes[1:3]) if len(modes) > 2 else (None, None)
    if not plain or not corrected or not math.isfinite(plain.mean) or plain.mean <= 0:
        return ""
    return f"{100 * (1 - corrected.mean / plain.mean):.0f} %"


def markdown_table(study: StudyConfig, cells: Sequence[Cell], paper: dict[str, tuple[float | None, ...]]) -> str:
    """Losses by mode, gaps, what the correction closes, and the paper's gaps where it gives them."""
    modes = list(study.modes)
    varied, compared = bool(study.variations), any(cell.optimizer in paper for cell in cells) and len(modes) == 3
    head = ["optimizer", *([study.axis or "variation"] if varied else []), "lr", *modes]
    head += [f"{mode} - {modes[0]}" for mode in modes[1:]]
    head += ["gap closed"] * (len(modes) == 3) + ["the paper's gaps, and closed"] * compared
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell in cells:
        row = [cell.optimizer, *([cell.variation] if varied else []), f"{cell.lr:g}"]
        row += [str(cell.losses[mode]) if mode in cell.losses else "" for mode in modes]
        row += [_signed(cell.gaps[mode]) if mode in cell.gaps else "" for mode in modes[1:]]
        row += [_closed(cell, modes)] * (len(modes) == 3) + [_of_paper(paper.get(cell.optimizer))] * compared
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _signed(gap: Sample) -> str:
    return str(gap) if not math.isfinite(gap.mean) else f"{'+' if gap.mean >= 0 else ''}{gap}"


def _of_paper(losses: tuple[float | None, ...] | None) -> str:
    if losses is None:
        return ""
    sync, delayed, corrected = losses
    if corrected is None:
        return f"{delayed - sync:+.3f}"
    closed = 100 * (1 - (corrected - sync) / (delayed - sync))
    return f"{delayed - sync:+.3f}, {corrected - sync:+.3f}; {closed:.0f} %"


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """One line per run."""
    rows = [result.row for result in results]
    aside = path.with_name(f".{path.name}")
    with aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    aside.rename(path)


def read_csv(path: Path) -> list[Result]:
    """The runs that a results.csv has written down; their folders and overrides are not in it as such."""
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            run = Run(row["optimizer"], row["mode"], row["variation"], float(row["lr"]), int(row["seed"]), ())
            counts = int(row["steps"]), int(row["tokens"]), float(row["seconds"])
            loss_x = float(row["val_loss_x"]) if row["val_loss_x"] else None
            code = row.get("code", "")
            found.append(Result(run, row["status"], float(row["val_loss"]), loss_x, *counts, Path(), code))
    return found


def write_tables(folder: Path, study: StudyConfig, results: Sequence[Result], paper: dict[str, tuple]) -> str:
    """results.csv and table.md; returns the table."""
    table = markdown_table(study, cells_of(study, results), paper)
    write_csv(folder / "results.csv", results)
    write_text(folder / "table.md", f"# {study.title}\n\n{table}")
    return table
