"""The pictures of the documentation, drawn again: studies from docs/studies/*.csv, concepts from their formulas.

python -m tools.study.pictures [out=docs/pictures] [source=docs/studies]
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

from megaasync.config import ConfigError

from ..command_line import check_output, one_message, read_pairs, wants_help
from .delay_study import read_options
from .plots import write_bars, write_gaps
from .results import cells_of, read_csv

_STUDIES = {"full": write_bars, "momentum": write_gaps, "batch": write_gaps, "depth": write_gaps, "phases": write_bars}
_COLORS = {"no delay": "#3b6ea8", "delay of one step": "#d1495b", "delay and error feedback": "#2e8b57"}


@dataclass(frozen=True, slots=True)
class Options:
    """What is drawn.

    Attributes:
        out: folder of the pictures.
        source: folder of the studies' results.
    """

    out: str = "docs/pictures"
    source: str = "docs/studies"


def write_study(name: str, source: Path, out: Path) -> Path:
    """One study's picture; returns its path."""
    options, _ = read_options([f"study={name}"])
    write: Callable[..., None] = _STUDIES[name]
    path = out / f"study_{name}.png"
    write(path, options.study, cells_of(options.study, read_csv(source / f"{name}.csv")))
    return path


def trajectory(a: float, *, momentum: float, delay: int, corrected: bool, steps: int) -> list[float]:
    """|z| of SGD on a scalar quadratic, from 1, by the rules of docs/method.md; momentum in Nesterov's form as Muon's.

    Args:
        a: learning rate times curvature.
        momentum: mu.
        delay: in updates.
        corrected: the gradient is taken at z minus the last update.
        steps: gradients.
    """
    z, last, m = [1.0], 0.0, 0.0
    seen = [1.0]  # where the gradients are taken
    for step in range(steps):
        if step >= delay:  # the first gradients have not arrived yet
            gradient = a * seen[step - delay]
            m = momentum * m + (1 - momentum) * gradient
            last = (1 - momentum) * gradient + momentum * m
            z.append(z[-1] - last)
        else:
            z.append(z[-1])
        seen.append(z[-1] - (delay * last if corrected else 0.0))
    return [abs(value) for value in z]


def write_delay(path: Path) -> None:
    """What a delay of one step does to SGD with momentum on two quadratics, a flat and a steep one."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained", sharey=True)
    titles = "flat direction: learning rate x curvature = 0.2", "steep direction: 2.2"
    for axis, a, title in zip(axes, (0.2, 2.2), titles, strict=True):
        for label, (delay, corrected) in zip(_COLORS, ((0, False), (1, False), (1, True)), strict=True):
            y = trajectory(a, momentum=0.9, delay=delay, corrected=corrected, steps=80)
            axis.plot([max(value, 1e-6) for value in y], color=_COLORS[label], label=label, linewidth=1.6)
        axis.set(title=title, xlabel="step", yscale="log", ylim=(1e-4, 2))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("distance from the minimum")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_versions(path: Path) -> None:
    """Which weights each batch sees and which it makes: synchronous above, 2BW below."""
    figure, axes = pyplot.subplots(2, 1, figsize=(9.5, 4.6), layout="constrained")
    for axis, delay, title in zip(
        axes,
        (0, 1),
        ("without a delay: batch t waits for version t", "2BW: batch t runs on version t - 1, which is there already"),
        strict=True,
    ):
        for version in range(6):
            axis.text(version, 1, f"w{version}", ha="center", va="center", bbox={"boxstyle": "round", "fc": "#e8eef6"})
        for batch in range(5):
            axis.text(
                batch + 0.5, 0, f"batch {batch}", ha="center", va="center", bbox={"boxstyle": "square", "fc": "#f9e9d5"}
            )
            seen = max(batch - delay, 0)
            arrow = {"arrowstyle": "->", "color": "#3b6ea8", "shrinkA": 12, "shrinkB": 12}
            axis.annotate("", (batch + 0.42, 0), (seen, 1), arrowprops=arrow)
            axis.annotate("", (batch + 1, 1), (batch + 0.58, 0), arrowprops={**arrow, "color": "#d1495b"})
        axis.set(xlim=(-0.4, 5.4), ylim=(-0.4, 1.4), title=title)
        axis.axis("off")
    note = "blue: the weights that a batch's forwards and backwards use; red: the update made of its gradient"
    figure.supxlabel(note, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Entry point."""
    if wants_help(Options, __doc__):
        return
    with one_message():
        options = read_pairs(Options, sys.argv[1:], parse=lambda key, value: value)
        out, source = Path(options.out), Path(options.source)
        check_output("out", out, is_folder=True)
        if not source.is_dir():
            raise ConfigError(f"source={source}: no such folder; run it in the checkout")
        mpl.use("Agg")
        out.mkdir(parents=True, exist_ok=True)
        written = [write_study(name, source, out) for name in _STUDIES]
        for name, write in (("concept_delay", write_delay), ("concept_versions", write_versions)):
            written.append(out / f"{name}.png")
            write(written[-1])
        print("written: " + ", ".join(map(str, written)))


if __name__ == "__main__":
    main()
