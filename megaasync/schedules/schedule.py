"""A schedule is a table plus a delay vector; every pipeline schedule of this project is one value of this type.

`delay[stage] = d` means: step t on that stage runs with weight version max(t - d, 0), where version v is the weights
after v optimizer steps (PipeDream-2BW, arXiv 2006.09503; METHOD.md section 2).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megaasync.schedules.action import Action, Op


class ScheduleError(ValueError):
    """A schedule that cannot run, or a wrong request for one."""


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

    A segment is a run of steps between two moments at which the pipeline is empty. Its drain needs no table of its own:
    it is `steady` without the actions of steps past the segment's end. STEP is in no table either: `unroll` puts it at
    the last legal place, just before the first forward that needs the version it writes.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    delay: tuple[int, ...]
    fill: tuple[tuple[Action, ...], ...]
    steady: tuple[tuple[Action, ...], ...]

    def version(self, *, stage: int, step: int) -> int:
        """Weight version that `step` uses on `stage`."""
        return max(step - self.delay[stage], 0)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages held by `rank`, in order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    @property
    def is_asynchronous(self) -> bool:
        """True if any stage runs on weights that lack the newest gradient."""
        return any(self.delay)

    @property
    def num_versions(self) -> tuple[int, ...]:
        """Weight versions held at once by each stage."""
        return tuple(delay + 1 for delay in self.delay)

    def staleness(self, step: int) -> int:
        """Updates made between the weights of batch `step` and its own update, on the most delayed stage."""
        return max(step - self.version(stage=stage, step=step) for stage in range(self.num_stages))


def unroll(
    schedule: PipelineSchedule,
    *,
    rank: int,
    first_step: int,
    end_step: Callable[[], int],
    num_updates: int,
    settle: bool = False,
) -> Iterator[Action]:
    """The actions of one rank over the segment [first_step, end_step()), lazily, with STEPs put in.

    Args:
        schedule: the tables.
        rank: whose actions.
        first_step: absolute step the segment starts with; the pipeline is empty.
        end_step: absolute step before which the segment ends. Asked again before every action, so that a run may be
            cut short while it goes on; it must not fall below a step whose first forward was already given out.
        num_updates: STEPs already made on every stage when the segment starts.
        settle: also apply the gradients that the delay would leave pending at the end.

    Yields:
        Absolute actions.
    """
    done = {stage: num_updates for stage in schedule.stages_of(rank)}

    def catch_up(stage: int, version: int) -> Iterator[Action]:
        while done[stage] < version:
            yield Action(Op.STEP, stage, done[stage])
            done[stage] += 1

    def absolute(table: tuple[Action, ...], base: int) -> Iterator[Action]:
        for relative in table:
            step = base + relative.step
            if step >= end_step():
                continue
            if relative.op is Op.F:
                yield from catch_up(relative.stage, schedule.version(stage=relative.stage, step=step))
                if step >= end_step():  # the STEP just made may have ended the run
                    continue
            yield Action(relative.op, relative.stage, step, relative.microbatch)

    yield from absolute(schedule.fill[rank], first_step)
    base = first_step
    while base < end_step():
        yield from absolute(schedule.steady[rank], base)
        base += 1
    end = end_step()  # not `base`, which is past it if the run was cut short in the step it had begun
    for stage in done:
        yield from catch_up(stage, end if settle else schedule.version(stage=stage, step=end))


def unroll_all(
    schedule: PipelineSchedule, *, num_steps: int, first_step: int = 0, num_updates: int = 0, settle: bool = True
) -> list[list[Action]]:
    """Every rank's actions over `num_steps` steps, as lists: for the checker, the simulator and pictures."""
    end = first_step + num_steps
    return [
        list(
            unroll(
                schedule,
                rank=rank,
                first_step=first_step,
                end_step=lambda: end,
                num_updates=num_updates,
                settle=settle,
            )
        )
        for rank in range(schedule.num_ranks)
    ]
