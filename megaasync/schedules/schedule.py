"""A schedule is a table plus a delay vector; every pipeline schedule of this project is one value of this type.

`delay[stage] = d` means: step t on that stage runs with weight version max(t - d, 0), where version v is the weights
after v optimizer steps (PipeDream-2BW, arXiv 2006.09503; METHOD.md section 2).
"""

from collections.abc import Callable, Iterator
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
        clip: whether gradients are clipped by the norm over all stages or each stage by its own. With `global`, NORM
            makes every stage wait for all.
        since: step at which the phase begins that this schedule is used in; its weights are settled, and no batch of
            the phase uses an older version.

    A segment is a run of steps between two moments at which the pipeline is empty. Its drain needs no table of its own:
    it is `steady` without the actions of steps past the segment's end. STEP and RESULT are in no table either: `unroll`
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
    since: int = 0

    def version(self, *, stage: int, step: int) -> int:
        """Weight version that `step` uses on `stage`."""
        return max(step - self.delay[stage], self.since)

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
    def is_tied(self) -> bool:
        """True if the first and the last stage share their embedding."""
        return any(action.op is Op.TIE for actions in self.steady for action in actions)

    @property
    def num_versions(self) -> tuple[int, ...]:
        """Weight versions held at once by each stage."""
        return tuple(delay + 1 for delay in self.delay)

    def staleness(self, step: int) -> int:
        """Updates made between the weights of batch `step` and its own update, on the most delayed stage."""
        return max(step - self.version(stage=stage, step=step) for stage in range(self.num_stages))


def unroll(
    schedule: PipelineSchedule, *, rank: int, first_step: int, end_step: Callable[[], int], settle: bool = False
) -> Iterator[Action]:
    """The actions of one rank over the segment [first_step, end_step()), lazily, with RESULTs and STEPs put in.

    Args:
        schedule: the tables.
        rank: whose actions.
        first_step: absolute step the segment starts with; the pipeline is empty.
        end_step: absolute step before which the segment ends. Asked again before every action, so that a run may be
            cut short while it goes on: it may fall to t + 1 + max(delay) when RESULT(t) is given out, as no rank has
            begun a later step by then.
        settle: also apply the gradients that the delay would leave pending at the end, unless the segment is cut short.

    Yields:
        Absolute actions.
    """
    done = {stage: schedule.version(stage=stage, step=first_step) for stage in schedule.stages_of(rank)}
    heeded = first_step
    lowest, longest_delay = min(done), max(schedule.delay)
    planned_end = end_step()

    def catch_up(stage: int, version: int) -> Iterator[Action]:
        while done[stage] < version:
            yield Action(Op.STEP, stage, done[stage])
            done[stage] += 1

    def before_forward(stage: int, step: int) -> Iterator[Action]:
        nonlocal heeded
        while heeded < step - longest_delay:
            yield Action(Op.RESULT, lowest, heeded)
            heeded += 1
        yield from catch_up(stage, schedule.version(stage=stage, step=min(step, end_step())))

    def absolute(table: tuple[Action, ...], base: int) -> Iterator[Action]:
        for relative in table:
            step = base + relative.step
            if step >= end_step():
                continue
            if relative.op is Op.F:
                yield from before_forward(relative.stage, step)
                if step >= end_step():  # the RESULT just given out may have ended the run
                    continue
            yield Action(relative.op, relative.stage, step, relative.microbatch)

    yield from absolute(schedule.fill[rank], first_step)
    base = first_step
    while base < end_step():
        yield from absolute(schedule.steady[rank], base)
        base += 1
    end = end_step()  # not `base`, which is past it if the run was cut short in the step it had begun
    for stage in done:
        yield from catch_up(stage, end if settle and end == planned_end else schedule.version(stage=stage, step=end))


def unroll_all(
    schedule: PipelineSchedule, *, num_steps: int, first_step: int = 0, settle: bool = True
) -> list[list[Action]]:
    """Every rank's actions over `num_steps` steps, as lists: for the checker, the simulator and pictures."""
    end = first_step + num_steps
    return [
        list(unroll(schedule, rank=rank, first_step=first_step, end_step=lambda: end, settle=settle))
        for rank in range(schedule.num_ranks)
    ]
