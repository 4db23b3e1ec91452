"""Pictures of a study: losses with error bars, gaps against what is varied, curves of training."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megaasync.observe.run_files import read_metrics

from .design import StudyConfig
from .results import Cell
from .runner import Result

_COLORS = ("#3b6ea8", "#d1495b", "#2e8b57", "#e0902f", "#7a5195", "#7f7f7f", "#00798c", "#b08968", "#c774b2", "#333333")
_SMOOTHED = 0.02  # of a run, per point of a curve
_APART = 0.12  # of the least distance between two points: how far the modes' bars stand beside each other
_BARS = "points: mean over the seeds; bars: standard deviation over the seeds"


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None


def _name(mode: str) -> str:
    return mode.replace("EF", "error feedback")


def _legend(figure: Figure, note: str = "") -> None:
    """One legend for all panels, below them, where no line is; what bars mean stands under it."""
    by_label = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    labels, handles = list(by_label), list(by_label.values())
    columns = min(len(labels), 4)
    legend = figure.legend(handles, labels, frameon=False, ncols=columns, loc="outside lower center", fontsize=9)
    if note:
        legend.set_title(note, prop={"size": 8})


def _beside(values: Sequence[float], number: int, count: int, *, is_log: bool) -> list[float]:
    """The places of one mode's points: around the value, so that no bar lies on another mode's."""
    scaled = [math.log2(value) for value in values] if is_log else list(values)
    least = min((b - a for a, b in itertools.pairwise(sorted(set(scaled)))), default=1.0)
    moved = [value + (number - (count - 1) / 2) * _APART * least for value in scaled]
    return [2**value for value in moved] if is_log else moved


def _finish(axis: Axes, *, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=11)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def write_bars(path: Path, study: StudyConfig, cells: Sequence[Cell]) -> None:
    """Losses of every mode, side by side, one group per optimizer and variation."""
    modes = list(study.modes)
    figure, axis = pyplot.subplots(
        figsize=(max(7.0, 1.6 + (0.3 * len(modes) + 0.6) * len(cells)), 4.6), layout="constrained"
    )
    width = 0.8 / len(modes)
    finite = [s.mean for cell in cells for s in cell.losses.values() if math.isfinite(s.mean)]
    low = min(finite)
    high = max(s.mean + s.deviation for cell in cells for s in cell.losses.values() if math.isfinite(s.mean))
    floor = low - 0.15 * (high - low + 1e-3)
    for number, mode in enumerate(modes):
        for place, cell in enumerate(cells):
            sample = cell.losses.get(mode)
            at = place + (number - (len(modes) - 1) / 2) * width
            if sample is None or not math.isfinite(sample.mean):
                axis.text(at, floor, "diverged" if sample else "", rotation=90, ha="center", va="bottom", fontsize=8)
                continue
            color, high_of = _COLORS[number % len(_COLORS)], sample.mean - floor
            axis.bar(at, high_of, width * 0.92, bottom=floor, color=color, label=_name(mode))
            axis.errorbar(at, sample.mean, yerr=sample.deviation, color="black", capsize=3, linewidth=1)
    names = [f"{cell.optimizer}\n{cell.variation}".strip() for cell in cells]
    axis.set_xticks(range(len(cells)), names)
    axis.set_ylim(floor, high + 0.05 * (high - floor))
    _finish(axis, title=study.title, x="", y="validation loss (the axis does not start at 0)")
    _legend(figure, _BARS.replace("points", "columns"))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_gaps(path: Path, study: StudyConfig, cells: Sequence[Cell]) -> None:
    """The gap of each mode to the first one against a number that is varied, one panel per optimizer."""
    optimizers = list(dict.fromkeys(cell.optimizer for cell in cells))
    figure, axes = pyplot.subplots(
        1, len(optimizers), figsize=(1.2 + 4.4 * len(optimizers), 4.0), layout="constrained", squeeze=False
    )
    for axis, optimizer in zip(axes[0], optimizers, strict=True):
        mine = [cell for cell in cells if cell.optimizer == optimizer]
        values = [_number(cell.variation) for cell in mine]
        is_log = min(values) > 0 and max(values) / min(values) >= 4
        others = list(study.modes)[1:]
        for number, mode in enumerate(others):
            points = [
                (_number(cell.variation), cell.gaps[mode])
                for cell in mine
                if mode in cell.gaps and math.isfinite(cell.gaps[mode].mean)
            ]
            if points:
                x, samples = zip(*points, strict=True)
                means, bars = [s.mean for s in samples], [s.deviation for s in samples]
                axis.errorbar(
                    _beside(x, number, len(others), is_log=is_log),
                    means,
                    yerr=bars,
                    color=_COLORS[(number + 1) % len(_COLORS)],
                    marker="o",
                    markersize=4,
                    capsize=3,
                    label=_name(mode),
                )
        axis.axhline(0, color="black", linewidth=0.8)
        if is_log:
            axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()
        first = next(iter(study.modes))
        _finish(axis, title=optimizer, x=study.axis, y=f"validation loss above {first}'s")
    _legend(figure, _BARS)
    figure.suptitle(study.title, fontsize=12)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _smoothed(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    size = max(int(len(losses) * _SMOOTHED), 1)
    starts = range(0, len(losses) - size + 1, size)
    return [start + size / 2 for start in starts], [sum(losses[start : start + size]) / size for start in starts]


def write_curves(path: Path, study: StudyConfig, results: Sequence[Result]) -> None:
    """Training loss against the step, averaged over short spans, one panel per optimizer; the first seed."""
    chosen = [
        r for r in results if r.run.seed == study.seeds[0] and r.run.variation == next(iter(study.variations), "")
    ]
    optimizers = list(dict.fromkeys(result.run.optimizer for result in chosen))
    columns = min(len(optimizers), 4)
    rows = -(-len(optimizers) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(1 + 4.2 * columns, 0.4 + 3.4 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(optimizers) :]:
        axis.set_visible(False)
    for axis, optimizer in zip(axes.flat, optimizers, strict=False):
        shown = []
        for number, mode in enumerate(study.modes):
            for result in (r for r in chosen if r.run.optimizer == optimizer and r.run.mode == mode):
                losses = [r["loss"] for r in read_metrics(result.folder / "metrics.jsonl") if r["kind"] == "train"]
                x, y = _smoothed([loss for loss in losses if isinstance(loss, float)])
                axis.plot(x, y, color=_COLORS[number % len(_COLORS)], linewidth=1.1, label=_name(mode))
                shown += y[len(y) // 5 :]
        if shown:
            room = 0.05 * (max(shown) - min(shown))
            axis.set_ylim(min(shown) - room, max(shown) + room)
        _finish(axis, title=optimizer, x="step", y="training loss")
    _legend(figure)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_plots(folder: Path, study: StudyConfig, cells: Sequence[Cell], results: Sequence[Result]) -> list[Path]:
    """Whatever pictures fit the study; returns their paths."""
    mpl.use("Agg")
    pictures = []
    if study.lr_grid:
        return pictures
    if study.variations and all(_number(label) is not None for label in study.variations):
        pictures.append(folder / "gaps.png")
        write_gaps(pictures[-1], study, cells)
    else:
        pictures.append(folder / "losses.png")
        write_bars(pictures[-1], study, cells)
    pictures.append(folder / "curves.png")
    write_curves(pictures[-1], study, results)
    return pictures
