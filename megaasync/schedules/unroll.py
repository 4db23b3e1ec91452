"""From the tables of a schedule to the actions of one rank over a segment of steps."""

from collections.abc import Iterator

from megaasync.schedules.action import Action, Op
from megaasync.schedules.schedule import PipelineSchedule


class Segment:
    """The steps [first, end) between two moments at which the pipeline is empty; the end may come down while they run.

    The executor, which walks the table, and the step runner, in its background, share one. A stop that step t's
    result tells of ends the segment before step t + 1 + max(delay): no rank has begun that step, because each waits
    for this result first. So it does not matter which of the two lowers the end first; if the runner does, the executor
    may end without executing SYNC(t), and collects the result afterwards.

    Attributes:
        first: its first step.
        planned_end: where it ends unless it is cut short.
        end: where it ends as far as is known.
    """

    def __init__(self, schedule: PipelineSchedule, first: int, end: int) -> None:
        self.first, self.end, self.planned_end = first, end, end
        self._delay = schedule.delay

    def stop_after(self, step: int) -> None:
        """The result of `step` tells that some rank asked to stop."""
        self.end = min(self.end, step + 1 + max(self._delay))

    def has_step_for(self, stage: int, step: int) -> bool:
        """Whether the update of a stage with the gradient of `step` belongs to it; later ones stay pending."""
        return step + self._delay[stage] < self.end

    @property
    def is_cut_short(self) -> bool:
        """Whether a stop has lowered the end."""
        return self.end < self.planned_end


def unroll(schedule: PipelineSchedule, segment: Segment, *, rank: int, flush: bool = False) -> Iterator[Action]:
    """The actions of one rank over a segment, lazily, with SYNCs and STEPs put in.

    Args:
        schedule: the tables.
        segment: its steps. The end is looked at before every action, so that a run may be cut short while it goes on.
        rank: whose actions.
        flush: also apply the gradients that the delay would leave pending at the end, unless the segment is cut short.

    Yields:
        Absolute actions.
    """
    first = segment.first
    done = {stage: schedule.version(stage=stage, step=first) for stage in schedule.stages_of(rank)}
    acknowledged = first
    lowest, longest_delay = min(done), max(schedule.delay)

    def catch_up(stage: int, version: int) -> Iterator[Action]:
        while done[stage] < version:
            yield Action(Op.STEP, stage, done[stage])
            done[stage] += 1

    def before_forward(stage: int, step: int) -> Iterator[Action]:
        nonlocal acknowledged
        while acknowledged < step - longest_delay:
            yield Action(Op.SYNC, lowest, acknowledged)
            acknowledged += 1
        yield from catch_up(stage, schedule.version(stage=stage, step=min(step, segment.end)))

    def absolute(table: tuple[Action, ...], base: int) -> Iterator[Action]:
        for relative in table:
            step = base + relative.step
            if step >= segment.end:
                continue
            if relative.op is Op.F:
                yield from before_forward(relative.stage, step)
                if step >= segment.end:  # the SYNC just given out may have ended the run
                    continue
            yield Action(relative.op, relative.stage, step, relative.microbatch)

    yield from absolute(schedule.fill[rank], first)
    base = first
    while base < segment.end:
        yield from absolute(schedule.steady[rank], base)
        base += 1
    end = segment.end  # not `base`, which is past it if the run was cut short in the step it had begun
    for stage in done:
        newest = schedule.version(stage=stage, step=end)
        yield from catch_up(stage, end if flush and not segment.is_cut_short else newest)


def unroll_all(
    schedule: PipelineSchedule, *, num_steps: int, first_step: int = 0, flush: bool = True
) -> list[list[Action]]:
    """Every rank's actions over `num_steps` steps, as lists: for the checker, the simulator and pictures."""
    segment = Segment(schedule, first_step, first_step + num_steps)
    return [list(unroll(schedule, segment, rank=rank, flush=flush)) for rank in range(schedule.num_ranks)]
