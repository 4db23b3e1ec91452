"""What a schedule costs, read off its table: bubble, versions, activations, gradient buffers, slack."""

from dataclasses import dataclass, replace

from megaasync.schedules.action import COMPUTE_OPS, Action, Op
from megaasync.schedules.schedule import PipelineSchedule
from megaasync.schedules.simulation import Costs, simulate
from megaasync.schedules.unroll import unroll_all


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """What the stages hold at once at most, whatever actions cost.

    Attributes:
        versions: weight versions, per stage.
        activations: microbatches in flight, per stage.
        gradient_buffers: gradient sums, per stage.
    """

    versions: tuple[int, ...]
    activations: tuple[int, ...]
    gradient_buffers: tuple[int, ...]


def buffer_counts(schedule: PipelineSchedule) -> BufferCounts:
    """Read off the table what must be held, without a simulation."""
    schedule = replace(schedule, start_step=0)
    table = unroll_all(schedule, num_steps=4 + 2 * max(schedule.delay))
    stages = range(schedule.num_stages)
    actions_of = [table[schedule.rank_of_stage[stage]] for stage in stages]
    opens, closes = (Op.I, Op.W) if schedule.splits_backward else (Op.B, Op.B)
    return BufferCounts(
        versions=schedule.num_versions,
        activations=tuple(_most_alive(actions_of[s], s, Op.F, closes, per_step=False) for s in stages),
        gradient_buffers=tuple(_most_alive(actions_of[s], s, opens, Op.STEP, per_step=True) for s in stages),
    )


@dataclass(frozen=True, slots=True)
class ScheduleMetrics:
    """What a schedule costs.

    Attributes:
        bubble: idle share of a long run's steady state, over all ranks.
        period: time per step in the steady state.
        exposed: the part of `period` that would not be there if reduction and step cost nothing.
        versions, activations, gradient_buffers: see `BufferCounts`.
        slack_before_norm: per stage, time from its own last backward to the STEP.
        slack: per stage, time from the moment all stages have submitted their norm to the STEP that needs it.
    """

    bubble: float
    period: float
    exposed: float
    versions: tuple[int, ...]
    activations: tuple[int, ...]
    gradient_buffers: tuple[int, ...]
    slack_before_norm: tuple[float, ...]
    slack: tuple[float, ...]


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


def _period(schedule: PipelineSchedule, costs: Costs, *, overlap: bool, num_steps: int) -> float:
    """Time per step between the middle of the run and its last but one step, when all ranks have the norm's terms."""
    spans = simulate(schedule, num_steps=num_steps, costs=costs, overlap=overlap)

    def finished(step: int) -> float:
        return max(s.end for s in spans if s.action.op in COMPUTE_OPS and s.action.step == step)

    first, last = num_steps // 2, num_steps - 2 - max(schedule.delay)
    return (finished(last) - finished(first)) / (last - first)


def schedule_metrics(
    schedule: PipelineSchedule, *, costs: Costs | None = None, overlap: bool = False
) -> ScheduleMetrics:
    """Read the figures of a schedule off a few simulated steps.

    The bubble is that of a long run: the time per step between two late steps, against the compute in it.
    """
    costs, schedule = costs or Costs(), replace(schedule, start_step=0)
    steps = 8 + 4 * max(schedule.delay)
    period = _period(schedule, costs, overlap=overlap, num_steps=steps)
    free = Costs(costs.forward, costs.backward, costs.weight, hop=costs.hop, scale=costs.scale)
    stages = range(schedule.num_stages)
    per_microbatch = sum(costs.of(Op.F, s) + costs.of(Op.B, s) for s in stages)
    compute = schedule.num_microbatches * per_microbatch / schedule.num_ranks
    held = buffer_counts(schedule)
    before, after = _slacks(schedule, free, num_steps=steps)
    return ScheduleMetrics(
        bubble=1.0 - compute / period,
        period=period,
        exposed=0.0 if costs == free else period - _period(schedule, free, overlap=overlap, num_steps=steps),
        versions=held.versions,
        activations=held.activations,
        gradient_buffers=held.gradient_buffers,
        slack_before_norm=before,
        slack=after,
    )


def _slacks(schedule: PipelineSchedule, costs: Costs, *, num_steps: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per stage, time to STEP from the stage's own REDUCE_GRAD, and from the last of those it waits for."""
    spans = simulate(schedule, num_steps=num_steps, costs=costs)
    middle = num_steps // 2
    norm_at = {s.action.stage: s.end for s in spans if s.action.op is Op.REDUCE_GRAD and s.action.step == middle}
    step_at = {s.action.stage: s.start for s in spans if s.action.op is Op.STEP and s.action.step == middle}
    before, after = [], []
    for stage in range(schedule.num_stages):
        needed = norm_at[stage] if schedule.clip == "stage" else max(norm_at.values())
        before.append(max(step_at[stage] - norm_at[stage], 0.0))
        after.append(max(step_at[stage] - needed, 0.0))
    return tuple(before), tuple(after)
