"""From a table and costs to a timeline, and from a timeline to figures: bubble, activations, slack.

Costs and times share one unit, which is the caller's.
"""

from dataclasses import dataclass

from megaasync.schedules.action import COMPUTE_OPS, Action, Op
from megaasync.schedules.rules import waits_for
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError, unroll_all


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of each operation on any stage, and of one hop between neighbouring stages."""

    forward: float = 1.0
    backward: float = 2.0
    step: float = 0.0
    hop: float = 0.0

    def of(self, op: Op) -> float:
        """Time that the operation keeps its rank."""
        return {Op.F: self.forward, Op.B: self.backward, Op.NORM: 0.0, Op.STEP: self.step}[op]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, from start to end."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """What a schedule costs, read off its table.

    Attributes:
        bubble: idle share of a long run's steady state, over all ranks.
        versions: weight versions held, per stage.
        activations: microbatches in flight at most, per stage.
        gradient_buffers: gradient sums alive at once at most, per stage.
        slack: per stage, time between the moment all stages have handed in their norm and the STEP that needs it.
    """

    bubble: float
    versions: tuple[int, ...]
    activations: tuple[int, ...]
    gradient_buffers: tuple[int, ...]
    slack: tuple[float, ...]


def simulate(
    schedule: PipelineSchedule, *, num_steps: int, costs: Costs | None = None, settle: bool = True
) -> list[Span]:
    """Run the table with every rank working in order and every receive blocking.

    Returns:
        Spans of all ranks, in order of start within each rank.

    Raises:
        ScheduleError: the table deadlocks.
    """
    costs = costs or Costs()
    table = unroll_all(schedule, num_steps=num_steps, settle=settle)
    ended: dict[Action, float] = {}
    spans: list[Span] = []
    clock, at = [0.0] * len(table), [0] * len(table)
    remaining = sum(len(actions) for actions in table)
    while remaining:
        moved = False
        for rank, actions in enumerate(table):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needs = waits_for(schedule, action)
                if any(need not in ended for need in needs):
                    break
                hop = costs.hop if action.op in COMPUTE_OPS else 0.0
                start = max([clock[rank], *(ended[need] + hop for need in needs)])
                clock[rank] = ended[action] = start + costs.of(action.op)
                spans.append(Span(rank, action, start, clock[rank]))
                at[rank] += 1
                remaining -= 1
                moved = True
        if not moved:
            raise ScheduleError(f"{schedule.name} with m = {schedule.num_microbatches} deadlocks")
    return sorted(spans, key=lambda span: (span.rank, span.start, span.end))


def bubble_of(spans: list[Span], *, num_ranks: int, first_step: int, last_step: int) -> float:
    """Idle share from the first F of `first_step` to the last action of `last_step`, on any rank.

    Idle is all time outside F and B; the same definition serves simulated and measured spans (CONTRACT.md).
    """
    start = min(span.start for span in spans if span.action.step == first_step and span.action.op is Op.F)
    compute = [span for span in spans if span.action.op in COMPUTE_OPS]
    end = max(span.end for span in spans if span.action.step == last_step)
    busy = sum(max(min(span.end, end) - max(span.start, start), 0.0) for span in compute)
    return 1.0 - busy / (num_ranks * (end - start))


def _most_alive(actions: list[Action], stage: int, opens: Op, closes: Op, *, per_step: bool) -> int:
    alive: set[tuple[int, int | None]] = set()
    most = 0
    for action in actions:
        if action.stage != stage:
            continue
        key = (action.step, None if per_step else action.microbatch)
        if action.op is opens:
            alive.add(key)
            most = max(most, len(alive))
        elif action.op is closes:
            alive.discard(key)
    return most


def report(schedule: PipelineSchedule, *, costs: Costs | None = None) -> ScheduleReport:
    """Read the figures of a schedule off a few simulated steps.

    The bubble is that of a long run: the time per step between two late steps, against the compute in it.
    """
    costs = costs or Costs()
    steps = 8
    spans = simulate(schedule, num_steps=steps, costs=costs)
    table = unroll_all(schedule, num_steps=steps)
    norm_done = {
        step: max(span.end for span in spans if span.action.op is Op.NORM and span.action.step == step)
        for step in range(steps)
    }
    middle = steps // 2
    period = norm_done[middle + 1] - norm_done[middle]
    stages_per_rank = schedule.num_stages / schedule.num_ranks
    compute = stages_per_rank * schedule.num_microbatches * (costs.forward + costs.backward)
    slack = []
    for stage in range(schedule.num_stages):
        step_start = next(s.start for s in spans if s.action == Action(Op.STEP, stage, middle))
        slack.append(max(step_start - norm_done[middle], 0.0))
    stages = range(schedule.num_stages)
    actions_of = [table[schedule.rank_of_stage[stage]] for stage in stages]
    return ScheduleReport(
        bubble=1.0 - compute / period,
        versions=schedule.num_versions,
        activations=tuple(_most_alive(actions_of[s], s, Op.F, Op.B, per_step=False) for s in stages),
        gradient_buffers=tuple(_most_alive(actions_of[s], s, Op.B, Op.STEP, per_step=True) for s in stages),
        slack=tuple(slack),
    )
