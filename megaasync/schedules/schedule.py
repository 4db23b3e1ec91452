"""A schedule is a table plus a delay vector; every pipeline schedule of this project is one value of this type.

`delay[stage] = d` means: step t on that stage runs with weight version max(t - d, 0), where version v is the weights
after v optimizer steps (PipeDream-2BW, arXiv 2006.09503; docs/method.md).
"""

from dataclasses import dataclass
from typing import Literal

from megaasync.schedules.action import Action, Op


class ScheduleError(ValueError):
    """A schedule that cannot run, or a wrong request for one.

    Attributes:
        wanted_microbatches: the nearest number of microbatches per step with which it could run, if that is what is
            wrong.
        remedy: a key and value of the config with which it could run, or empty.
    """

    def __init__(self, message: str, *, wanted_microbatches: int | None = None, remedy: str = "") -> None:
        super().__init__(message)
        self.wanted_microbatches, self.remedy = wanted_microbatches, remedy


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """Who does what, when.

    Attributes:
        name: the name users type.
        num_ranks, num_stages, num_microbatches: sizes; microbatches are per step.
        rank_of_stage: rank that holds each stage.
        delay: weight-version delay of each stage, in optimizer steps.
        fill: per rank, the actions before the first step of a segment; steps are relative to that first step.
        steady: per rank, the actions repeated for every step; steps are relative to the repeated step.
        in_flight: per rank, microbatches (of any of its stages) whose activations it may hold at once.
        clip: whether gradients are clipped by the norm over all stages or each stage by its own. With `global`, no
            stage steps before all have reduced their gradient.
        start_step: step at which the phase begins that this schedule is used in; no gradient is pending then, and no
            batch of the phase uses an older version.
        is_tied: the first and the last of several stages share their embedding, whose gradients are summed before
            the global norm.

    A segment is a run of steps between two moments at which the pipeline is empty. Its drain needs no table of its own:
    it is `steady` without the actions of steps past the segment's end. STEP and SYNC are in no table either: `unroll`
    puts them at the last legal place, just before the first forward that needs the version, or the permission.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    delay: tuple[int, ...]
    fill: tuple[tuple[Action, ...], ...]
    steady: tuple[tuple[Action, ...], ...]
    in_flight: tuple[int, ...]
    clip: Literal["global", "stage"] = "global"
    start_step: int = 0
    is_tied: bool = False

    def version(self, *, stage: int, step: int) -> int:
        """Weight version that `step` uses on `stage`."""
        return max(step - self.delay[stage], self.start_step)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages held by `rank`, in order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    @property
    def is_asynchronous(self) -> bool:
        """True if any stage runs on weights that lack the newest gradient."""
        return any(self.delay)

    @property
    def splits_backward(self) -> bool:
        """True if input and weight gradients are separate actions."""
        return any(action.op is Op.W for actions in self.steady for action in actions)

    @property
    def num_versions(self) -> tuple[int, ...]:
        """Weight versions held at once by each stage."""
        return tuple(delay + 1 for delay in self.delay)

    def staleness(self, step: int) -> int:
        """Updates made between the weights of batch `step` and its own update, on the most delayed stage."""
        return max(step - self.version(stage=stage, step=step) for stage in range(self.num_stages))
