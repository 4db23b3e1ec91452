"""Muon under a fixed delay on problems of known smoothness: measured convergence beside what theory bounds.

    python -m tools.study.delay_theory [steps=800] [delays=0,1,2,4,8] [problems=quadratic,...] [out=...]

Every run is the product's executor on one rank with `optimizer=muon`. Writes theory.csv, theory.md and a picture per
problem into `out`. What the bound says, and its source: docs/theory.md.
"""

import csv
import itertools
import math
import sys
from abc import abstractmethod
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot
from torch import Tensor

from megaasync.config import ConfigError
from megaasync.entry.text_values import load_yaml
from megaasync.observe.run_files import write_text
from megaasync.update_rules.kinds.muon import MuonConfig

from ..command_line import check_output, one_message, read_pairs, wants_help
from .problems import Problem, Setting, solve

_ROWS, _COLUMNS = 12, 16
_MUON = MuonConfig("muon", 0.0, 0.0, 0.0, 5, "auto", betas=(0.9, 0.95), eps=1e-8)
_SINGULAR_VALUES = (0.7, 1.2)  # after five Newton-Schulz steps, of all that are not tiny before
_SCALE = 0.2 * math.sqrt(_COLUMNS)  # of Muon's update, over an orthogonal matrix


@dataclass(frozen=True, slots=True)
class Theory:
    """What to measure.

    Attributes:
        steps: longest run, T.
        delays: gradient delays, in updates.
        problems: of quadratic, momentum, logistic, noisy.
        step_sizes: spectral norms of an update that are tried; the best one counts for each T.
        seeds: of the noise.
        out: folder.
    """

    steps: int = 800
    delays: tuple[int, ...] = (0, 1, 2, 4, 8)
    problems: tuple[str, ...] = ("quadratic", "momentum", "logistic", "noisy")
    step_sizes: tuple[float, ...] = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
    seeds: int = 3
    out: str = "runs/theory"


class Measured(Problem):
    """A problem with known smoothness."""

    smoothness: float  # L: |grad f(X) - grad f(Y)|_nuclear <= L |X - Y|_spectral
    gap: float  # f(start) - inf f
    momentum: float = 0.0

    @abstractmethod
    def value(self, weight: Tensor) -> Tensor:
        """f, without noise."""

    def noise(self, weight: Tensor, step: int) -> Tensor | float:
        """Added to f: linear in the weights, of mean zero."""
        return 0.0

    def loss(self, weight: Tensor, step: int) -> Tensor:
        """f with noise."""
        return self.value(weight) + self.noise(weight, step)

    def norm(self, point: Tensor) -> float:
        """Nuclear norm of the gradient of f, without noise."""
        point = point.detach().clone().requires_grad_()
        (true,) = torch.autograd.grad(self.value(point), point)
        return torch.linalg.matrix_norm(true, "nuc").item()


class Quadratic(Measured):
    """1/2 tr (W - W*)^T H (W - W*), H diagonal with condition 100; L = tr H."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(0)
        super().__init__(torch.zeros(_ROWS, _COLUMNS, dtype=torch.float64))
        self.curvatures = torch.logspace(-2, 0, _ROWS, dtype=torch.float64)[:, None]
        self.target = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64) / 4
        self.smoothness = self.curvatures.sum().item()
        self.gap = self.value(self.weight.detach()).item()

    def value(self, weight: Tensor) -> Tensor:
        """f."""
        return 0.5 * (self.curvatures * (weight - self.target).square()).sum()


class Logistic(Measured):
    """Multinomial logistic regression on 256 points; L = mean |x|^2 / 2, as softmax has curvature at most 1/2."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(1)
        super().__init__(torch.zeros(_ROWS, _COLUMNS, dtype=torch.float64))
        self.points = torch.randn(256, _COLUMNS, generator=generator, dtype=torch.float64) / 4
        truth = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
        # labels drawn from a model, so that the best loss is not 0 and is reached
        self.labels = torch.multinomial((4 * self.points @ truth.T).softmax(1), 1, generator=generator).squeeze(1)
        self.smoothness = 0.5 * self.points.square().sum(1).mean().item()
        self.gap = self.value(self.weight.detach()).item()  # f >= 0, so this bounds f(start) - inf f

    def value(self, weight: Tensor) -> Tensor:
        """f."""
        return torch.nn.functional.cross_entropy(self.points @ weight.T, self.labels)


class Heavy(Quadratic):
    """The quadratic with momentum 0.9."""

    momentum = 0.9


class Noisy(Quadratic):
    """The quadratic with Gaussian noise in the gradient; momentum 0.9 averages it."""

    momentum = 0.9
    deviation = 0.05  # of each element

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seed = seed

    def noise(self, weight: Tensor, step: int) -> Tensor:
        """<N, W>."""
        generator = torch.Generator().manual_seed(1_000_003 * (self._seed + 1) + step)
        drawn = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        return self.deviation * (drawn * weight).sum()


_PROBLEMS = {"quadratic": Quadratic, "momentum": Heavy, "logistic": Logistic, "noisy": Noisy}
_WITHOUT_BOUND = ("momentum", "noisy")


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `step_size`: spectral norm of an update, about (Newton-Schulz: 0.7 to 1.2 of it)."""

    problem: str
    delay: int
    corrected: bool
    step_size: float
    seed: int
    steps: int


def run_trial(trial: Trial) -> np.ndarray:
    """[steps] average over the first t steps of the gradient's nuclear norm at z, the iterate that is kept.

    Not where gradients are taken: under error feedback those are points ahead, which nobody evaluates or exports.
    """
    torch.set_num_threads(1)
    problem = _PROBLEMS[trial.problem](trial.seed)
    muon = MuonConfig(_MUON.name, 0.0, 0.0, problem.momentum, 5, "auto", _MUON.betas, _MUON.eps)
    setting = Setting(muon, trial.delay, trial.corrected, trial.step_size / _SCALE, trial.steps)
    norms = [problem.norm(visit.z.view_as(problem.weight)) for visit in solve(problem, setting)]
    return np.cumsum(norms) / np.arange(1, trial.steps + 1)


def bound(problem: Measured, *, delay: int, corrected: bool, steps: float) -> float:
    """Of the average nuclear norm at z, with the best constant step; docs/theory.md.

    2 (b / a) sqrt(Delta L (1/2 + 2 D) / T), where Newton-Schulz gives singular values in [a, b]; the gradient is taken
    at most D = d updates away, with error feedback 2 d.
    """
    low, high = _SINGULAR_VALUES
    away = 2 * delay if corrected else delay
    return 2 * high / low * math.sqrt(problem.gap * problem.smoothness * (0.5 + 2 * away) / steps)


@dataclass(frozen=True, slots=True)
class Curve:
    """The best average at every T, of all step sizes: mean over seeds and their deviation, both [steps]."""

    problem: str
    delay: int
    corrected: bool
    mean: np.ndarray
    deviation: np.ndarray
    best_step: float  # size, at the end
    is_inside: bool  # of the step sizes tried

    @property
    def rate(self) -> float:
        """Fitted exponent of T over its last factor of 8."""
        last = len(self.mean)
        times = np.unique(np.geomspace(last / 8, last, 20).astype(int))
        return float(np.polyfit(np.log(times), np.log(self.mean[times - 1]), 1)[0])


def measure(theory: Theory) -> list[Curve]:
    """All curves, trials in parallel over the cores."""
    keys = [
        (problem, delay, corrected)
        for problem in theory.problems
        for delay in theory.delays
        for corrected in ((False, True) if delay else (False,))
    ]
    trials = [
        Trial(problem, delay, corrected, step_size, seed, theory.steps)
        for problem, delay, corrected in keys
        for step_size in theory.step_sizes
        for seed in range(theory.seeds if problem == "noisy" else 1)
    ]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(trials, pool.map(run_trial, trials, chunksize=4), strict=True))
    curves = []
    for key in keys:
        mine = {
            trial: average for trial, average in found.items() if (trial.problem, trial.delay, trial.corrected) == key
        }
        by_seed = [
            np.min([average for trial, average in mine.items() if trial.seed == seed], axis=0)
            for seed in sorted({trial.seed for trial in mine})
        ]
        deviation = np.std(by_seed, axis=0, ddof=1) if len(by_seed) > 1 else np.zeros(theory.steps)
        at_end = {
            size: np.mean([average[-1] for trial, average in mine.items() if trial.step_size == size])
            for size in theory.step_sizes
        }
        best = min(at_end, key=at_end.__getitem__)
        is_inside = min(theory.step_sizes) < best < max(theory.step_sizes)
        curves.append(Curve(*key, np.mean(by_seed, axis=0), deviation, best, is_inside))
    return curves


def table(theory: Theory, curves: list[Curve]) -> tuple[str, list[dict]]:
    """Markdown, and rows for the CSV file."""
    lines = [
        "| problem | delay | correction | average gradient norm at T | over no delay | bound | bound over no delay | "
        "fitted exponent of T | best step size |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = []
    for curve in curves:
        problem = _PROBLEMS[curve.problem](0)
        base = next(c for c in curves if c.problem == curve.problem and c.delay == min(theory.delays))
        limit = (
            None
            if curve.problem in _WITHOUT_BOUND
            else bound(problem, delay=curve.delay, corrected=curve.corrected, steps=theory.steps)
        )
        slower = math.sqrt((0.5 + 2 * curve.delay * (1 + curve.corrected)) / 0.5)
        row = {
            "problem": curve.problem,
            "delay": curve.delay,
            "correction": "error feedback" if curve.corrected else "none",
            "T": theory.steps,
            "norm": float(curve.mean[-1]),
            "deviation": float(curve.deviation[-1]),
            "over_no_delay": float(curve.mean[-1] / base.mean[-1]),
            "bound": limit,
            "bound_over_no_delay": None if limit is None else slower,
            "exponent": curve.rate,
            "step_size": curve.best_step,
            "step_size_is_inside": curve.is_inside,
        }
        rows.append(row)
        spread = f" ± {row['deviation']:.4f}" if row["deviation"] else ""
        of_bound = "" if row["bound_over_no_delay"] is None else f"{row['bound_over_no_delay']:.2f}"
        lines.append(
            f"| {row['problem']} | {row['delay']} | {row['correction']} | {row['norm']:.4f}{spread} | "
            f"{row['over_no_delay']:.2f} | {'' if limit is None else f'{limit:.2f}'} | {of_bound} | "
            f"{row['exponent']:.2f} | {row['step_size']:g}{'' if curve.is_inside else ', end of those tried'} |"
        )
    return "\n".join(lines) + "\n", rows


def write_picture(path: Path, name: str, theory: Theory, curves: list[Curve]) -> None:
    """Left: against T. Right: against the delay."""
    mpl.use("Agg")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5.0), layout="constrained")
    times = np.arange(1, theory.steps + 1)
    colors = dict(zip(theory.delays, pyplot.get_cmap("viridis")(np.linspace(0, 0.85, len(theory.delays))), strict=True))
    problem = _PROBLEMS[name](0)
    mine = [curve for curve in curves if curve.problem == name]
    for curve in mine:
        label = f"delay {curve.delay}" + (", error feedback" if curve.corrected else "")
        style = "--" if curve.corrected else "-"
        left.plot(times, curve.mean, style, color=colors[curve.delay], linewidth=1.3, label=label)
    if name not in _WITHOUT_BOUND:
        worst = max(theory.delays)
        left.plot(
            times,
            [bound(problem, delay=0, corrected=False, steps=t) for t in times],
            ":",
            color="black",
            label="bound, delay 0",
        )
        left.plot(
            times,
            [bound(problem, delay=worst, corrected=False, steps=t) for t in times],
            ":",
            color="gray",
            label=f"bound, delay {worst}",
        )
    left.set(
        xscale="log", yscale="log", xlabel="steps T", ylabel="average nuclear norm of the gradient, best step size"
    )
    base = next(curve for curve in mine if curve.delay == min(theory.delays))
    for corrected, label in ((False, "delayed"), (True, "delayed + error feedback")):
        points = [curve for curve in mine if curve.corrected == corrected or curve.delay == 0]
        right.errorbar(
            [curve.delay for curve in points],
            [curve.mean[-1] / base.mean[-1] for curve in points],
            yerr=[curve.deviation[-1] / base.mean[-1] for curve in points],
            marker="o",
            capsize=3,
            color="#3b6ea8" if not corrected else "#d1495b",
            label=label,
        )
    if name not in _WITHOUT_BOUND:
        right.plot(
            theory.delays,
            [math.sqrt(1 + 4 * d) for d in theory.delays],
            ":",
            color="black",
            label="bound: sqrt(1 + 4 d)",
        )
    right.set(xlabel="delay d", ylabel=f"over no delay, at T = {theory.steps}")
    right.legend(frameon=False, loc="upper left")
    figure.legend(*left.get_legend_handles_labels(), frameon=False, ncols=4, fontsize=8, loc="outside lower center")
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Muon under delay: {name} (error bars: standard deviation over seeds)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def read_arguments(arguments: list[str]) -> Theory:
    """The command line.

    Raises:
        ConfigError: names key, value and remedy.
    """
    lists = {"delays", "problems", "step_sizes"}
    theory = read_pairs(Theory, arguments, parse=lambda key, value: load_yaml(f"[{value}]" if key in lists else value))
    for name in theory.problems:
        if name not in _PROBLEMS:
            raise ConfigError(f"problems={name}: unknown problem; choose {', '.join(_PROBLEMS)}")
    for key, least in (("steps", 16), ("seeds", 1)):
        if getattr(theory, key) < least:
            raise ConfigError(f"{key}={getattr(theory, key)}: must be at least {least}")
    if not theory.delays or min(theory.delays) != 0:
        raise ConfigError(f"delays={list(theory.delays)}: must hold 0, which the others are compared with")
    if not theory.step_sizes or min(theory.step_sizes) <= 0:
        raise ConfigError(f"step_sizes={list(theory.step_sizes)}: must be above 0")
    check_output("out", Path(theory.out), is_folder=True)
    return theory


def main() -> None:
    """Entry point."""
    if wants_help(Theory, __doc__):
        return
    with one_message():
        theory = read_arguments(sys.argv[1:])
        folder = Path(theory.out)
        folder.mkdir(parents=True, exist_ok=True)
        curves = measure(theory)
        text, rows = table(theory, curves)
        print(text)
        write_text(folder / "theory.md", text)
        with (folder / "theory.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        for name, _ in itertools.groupby(theory.problems):
            write_picture(folder / f"{name}.png", name, theory, curves)
        print(f"written: {folder}/theory.csv, theory.md, {', '.join(f'{name}.png' for name in theory.problems)}")


if __name__ == "__main__":
    main()
