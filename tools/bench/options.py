"""What a benchmark measures, as its command line says it. Imports no torch: a wrong word is told of at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaasync.config import ConfigError
from megaasync.entry.text_values import load_yaml
from megaasync.schedules import SCHEDULES

from ..command_line import check_output, read_pairs
from .case import TORCH_SCHEDULES


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure.

    Attributes:
        mode: emulated or real compute.
        ranks: numbers of pipeline ranks.
        microbatches_per_rank: m / P; every combination with `ranks` is one setting; 0 stands for m = 1.
        schedules: names of ours and classes of torch's, or `all`; `pipedream` (m = 1 only) is not among `all`.
        extra_in_flight: for those of ours that take it.
        overlap_step: our optimizer steps run in the background.
        rounds: measurements of each schedule.
        steps: per measurement.
        forward_ms, backward_ms: emulated costs of one microbatch on one rank.
        hop, reduce, step: emulated, in forwards: between ranks; per step.
        real_update: in emulated mode, reduction and step are real: gloo between two replicas, Newton-Schulz.
        overrides: of the model and optimizer in real mode, as for megaasync.pretrain.
        timelines: in emulated mode also draw each of our schedules, planned and measured, as timeline-NAME.svg.
        out: folder to write to; null makes one under runs/.
    """

    mode: Literal["emulated", "real"] = "emulated"
    ranks: tuple[int, ...] = (4,)
    microbatches_per_rank: tuple[int, ...] = (1, 2)
    schedules: Literal["all"] | tuple[str, ...] = "all"
    extra_in_flight: int = 0
    overlap_step: bool = True
    rounds: int = 3
    steps: int = 10
    forward_ms: float = 40.0
    backward_ms: float = 80.0
    hop: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    real_update: bool = False
    overrides: tuple[str, ...] = ()
    timelines: bool = False
    out: str | None = None


def read_arguments(arguments: list[str]) -> Bench:
    """The command line as a Bench.

    Raises:
        ConfigError: names key, value and remedy.
    """
    listed = {"ranks", "microbatches_per_rank", "overrides"}

    def parse(key: str, value: str) -> Any:
        is_list = key in listed or (key == "schedules" and value != "all")
        return load_yaml(f"[{value}]" if is_list else value)

    bench = read_pairs(Bench, arguments, parse=parse)
    known = {**SCHEDULES, **TORCH_SCHEDULES}
    for name in () if bench.schedules == "all" else bench.schedules:
        if name not in known:
            raise ConfigError(f"schedules={name}: unknown schedule; choose {', '.join(known)}")
    least_of = {"rounds": 1, "steps": 5, "forward_ms": 0.1, "backward_ms": 0.1}
    for key, least in (least_of | dict.fromkeys(("hop", "reduce", "step", "extra_in_flight"), 0)).items():
        if getattr(bench, key) < least:
            raise ConfigError(f"{key}={getattr(bench, key)}: must be at least {least}")
    for key in ("ranks", "microbatches_per_rank"):
        least = 1 if key == "ranks" else 0
        if not getattr(bench, key) or min(getattr(bench, key)) < least:
            raise ConfigError(f"{key}={list(getattr(bench, key))}: must be numbers of at least {least}")
    check_output("out", Path(bench.out or "runs"), is_folder=True)
    return bench
