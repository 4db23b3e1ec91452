"""From a table and costs to a timeline.

Costs and times share one unit, which is the caller's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megaasync.schedules.action import COMPUTE_OPS, Action, Op
from megaasync.schedules.rules import waits_for
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError
from megaasync.schedules.unroll import unroll_all


@dataclass(frozen=True, slots=True)
class Costs:
    """What each action takes.

    Attributes:
        forward, backward: of one microbatch on one stage.
        weight: the part of a backward that is its weight gradients (W); the rest is its input gradients (I).
        reduce: per stage and step, before the norm is submitted: the data-parallel reduction.
        step: per stage and step: the optimizer and the publication of the new version.
        hop: from the end of an action to the moment its message can be used on another rank.
        scale: per stage, a factor on forward, backward and step; empty for equal stages.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0
    reduce: float = 0.0
    step: float = 0.0
    hop: float = 0.0
    scale: tuple[float, ...] = ()

    def of(self, op: Op, stage: int) -> float:
        """Time that the operation takes."""
        base = {
            Op.F: self.forward,
            Op.B: self.backward,
            Op.I: self.backward - self.weight,
            Op.W: self.weight,
            Op.REDUCE_GRAD: self.reduce,
            Op.STEP: self.step,
        }.get(op, 0.0)
        return base * self.scale[stage] if self.scale and op is not Op.REDUCE_GRAD else base


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, from start to end; `beside` if it ran in the background of other actions."""

    rank: int
    action: Action
    start: float
    end: float
    beside: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    """One item of a lane. `key` is what others wait for; None leaves no mark."""

    action: Action
    key: tuple[str, Action]
    cost: float
    needs: tuple[tuple[tuple[str, Action], float], ...]  # what must be done, and the hop after it


def _lanes(
    schedule: PipelineSchedule, table: list[list[Action]], costs: Costs, *, overlap: bool
) -> Iterator[tuple[int, bool, list[_Task]]]:
    """(rank, beside, tasks) of every line of work. With overlap a rank has two: its table, and its background.

    In the background, a reduction begins when the table has come to it, and each stage's STEP when all stages' norms
    are known; the table's own STEP then only waits.
    """
    for rank, actions in enumerate(table):
        main, background = [], []
        waiting: dict[int, list[Action]] = {}
        for action in actions:
            needs = []
            for need in waits_for(schedule, action):
                crosses = action.op in COMPUTE_OPS and schedule.rank_of_stage[need.stage] != rank
                needs.append((("done", need), costs.hop if crosses else 0.0))
            cost = costs.of(action.op, action.stage)
            if not overlap or action.op in COMPUTE_OPS:
                main.append(_Task(action, ("done", action), cost, tuple(needs)))
            elif action.op is Op.REDUCE_GRAD:
                main.append(_Task(action, ("handed", action), 0.0, ()))
                background.append(_Task(action, ("done", action), cost, ((("handed", action), 0.0), *needs)))
                of_step = waiting.setdefault(action.step, [])
                of_step.append(action)
                if len(of_step) == len(schedule.stages_of(rank)):
                    for norm in sorted(of_step, key=lambda action: (schedule.delay[action.stage], action.stage)):
                        step = Action(Op.STEP, norm.stage, norm.step)
                        step_needs = tuple((("done", need), 0.0) for need in waits_for(schedule, step))
                        background.append(_Task(step, ("done", step), costs.of(Op.STEP, norm.stage), step_needs))
            elif action.op is Op.STEP:
                main.append(_Task(action, ("seen", action), 0.0, ((("done", action), 0.0),)))
            else:
                main.append(_Task(action, ("done", action), 0.0, tuple(needs)))
        yield rank, False, main
        if overlap:
            yield rank, True, background


def simulate(
    schedule: PipelineSchedule,
    *,
    num_steps: int,
    costs: Costs | None = None,
    flush: bool = True,
    overlap: bool = False,
) -> list[Span]:
    """Run the table from step 0, with every rank working in order and every receive blocking.

    Args:
        schedule: the tables.
        num_steps: steps from an empty to an empty pipeline.
        costs: of actions and hops.
        flush: apply the gradients that the delay leaves pending.
        overlap: reduction, norm and optimizer step run in the background, as the engine does where clipping is global.

    Returns:
        Spans of all ranks, in order of start within each rank.

    Raises:
        ScheduleError: the table deadlocks.
    """
    costs, schedule = costs or Costs(), replace(schedule, start_step=0)
    overlap = overlap and schedule.clip == "global"
    table = unroll_all(schedule, num_steps=num_steps, flush=flush)
    ended: dict[tuple[str, Action], float] = {}
    spans: list[Span] = []
    lanes = list(_lanes(schedule, table, costs, overlap=overlap))
    clock, at = [0.0] * len(lanes), [0] * len(lanes)
    remaining = sum(len(tasks) for _, _, tasks in lanes)
    while remaining:
        moved = False
        for lane, (rank, beside, tasks) in enumerate(lanes):
            while at[lane] < len(tasks):
                task = tasks[at[lane]]
                if any(key not in ended for key, _ in task.needs):
                    break
                start = max([clock[lane], *(ended[key] + hop for key, hop in task.needs)])
                clock[lane] = ended[task.key] = start + task.cost
                if task.key[0] == "done" and task.action.op is not Op.SYNC:  # the others are moments, not work
                    spans.append(Span(rank, task.action, start, clock[lane], beside))
                at[lane] += 1
                remaining -= 1
                moved = True
        if not moved:
            raise ScheduleError(f"{schedule.name} with m = {schedule.num_microbatches} deadlocks")
    return sorted(spans, key=lambda span: (span.rank, span.start, span.end))


def bubble_of(spans: list[Span], *, num_ranks: int, first_step: int, last_step: int) -> float:
    """Idle share from the first F of `first_step` to the last action of `last_step`, on any rank.

    Idle is all time outside F, B, I and W; the same definition serves simulated and measured spans (docs/method.md).
    """
    start = min(span.start for span in spans if span.action.step == first_step and span.action.op is Op.F)
    compute = [span for span in spans if span.action.op in COMPUTE_OPS]
    end = max(span.end for span in spans if span.action.step == last_step)
    busy = sum(max(min(span.end, end) - max(span.start, start), 0.0) for span in compute)
    return 1.0 - busy / (num_ranks * (end - start))
