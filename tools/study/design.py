"""What a study is: the runs it consists of, as data."""

import hashlib
import re
from dataclasses import dataclass
from itertools import product

from megaasync.config import ConfigError, did_you_mean, listed

Overrides = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """One study: every optimizer x mode x variation x seed is a run of `python -m megaasync.pretrain`.

    Attributes:
        name: of the study.
        title: what it asks, for its page.
        base: overrides of every run.
        optimizers: overrides by label.
        modes: overrides by label, as `sync: [schedule=1f1b]`; the first one is what the others are compared with.
        variations: by label, what is varied: overrides by optimizer, by mode, or for `all`.
        axis: what the labels of the variations mean; a number on each label makes a plot against it.
        lrs: peak lr by optimizer label.
        lr_grid: factors; if not empty the study tunes: each factor times the optimizer's lr is a variation.
        seeds: of every run.
    """

    name: str
    title: str
    base: tuple[str, ...]
    optimizers: Overrides
    modes: Overrides
    variations: dict[str, Overrides]
    axis: str
    lrs: dict[str, float]
    lr_grid: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """The command line.

    Attributes:
        study: what to run.
        out: folder of the results; null takes runs/study/<name>. Runs are in `runs` beside it, and runs that several
            studies have in common are made once.
        workers: runs at once; null takes one per core this process may use, or per GPU with device=cuda.
        device: of the runs.
        only: labels of optimizers to run; empty for all.
        overrides: further overrides of every run.
        report_only: make tables and plots of what is there; run nothing.
    """

    study: StudyConfig
    out: str | None
    workers: int | None
    device: str
    only: tuple[str, ...]
    overrides: tuple[str, ...]
    report_only: bool


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a study."""

    optimizer: str
    mode: str
    variation: str
    lr: float
    seed: int
    overrides: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Name of its folder: what it is, and its overrides in short, so that studies can share their runs."""
        return f"{self.optimizer}-seed{self.seed}-{hashlib.sha256(' '.join(self.overrides).encode()).hexdigest()[:8]}"

    @property
    def label(self) -> str:
        """What it is."""
        parts = (self.optimizer, self.mode, self.variation, f"lr{self.lr:g}", f"seed{self.seed}")
        return re.sub(r"[^\w=.]+", "-", "-".join(part for part in parts if part))


def check_options(options: StudyOptions) -> None:
    """Labels that are used exist, and every list has something in it.

    Raises:
        ConfigError: names key, value and remedy.
    """
    study = options.study
    for key in ("optimizers", "modes", "seeds"):
        if not getattr(study, key):
            raise ConfigError(f"study.{key}={getattr(study, key)!r}: at least one is needed")
    for label in options.only:
        if label not in study.optimizers:
            near = did_you_mean(label, study.optimizers)
            raise ConfigError(f"only={label}: unknown optimizer{near}; this study has {listed(study.optimizers)}")
    for label in study.optimizers:
        if label not in study.lrs:
            raise ConfigError(f"study.lrs: no lr for {label}; add study.lrs.{label}=...")
    known = {"all", *study.optimizers, *study.modes}
    for variation, overrides in study.variations.items():
        for key in overrides:
            if key not in known:
                raise ConfigError(f"study.variations.{variation}.{key}: unknown label; choose {listed(sorted(known))}")
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"workers={options.workers}: must be at least 1")


def runs_of(options: StudyOptions) -> list[Run]:
    """All runs, seeds last, so that the first runs already show something of everything."""
    study = options.study
    labels = [label for label in study.optimizers if not options.only or label in options.only]
    factors = study.lr_grid or (1.0,)
    runs = []
    for seed, variation, factor, optimizer, mode in product(
        study.seeds, study.variations or {"": {}}, factors, labels, study.modes
    ):
        lr = study.lrs[optimizer] * factor
        varied = study.variations.get(variation, {})
        overrides = (
            *study.base,
            *study.optimizers[optimizer],
            f"optimizer.lr={lr:g}",
            *study.modes[mode],
            *(override for key in ("all", optimizer, mode) for override in varied.get(key, ())),
            *options.overrides,
            f"train.seed={seed}",
            f"device={options.device}",
        )
        runs.append(Run(optimizer, mode, variation, lr, seed, overrides))
    return runs
