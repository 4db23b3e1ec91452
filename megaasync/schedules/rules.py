"""The rules that every unrolled table must keep, one named function each; the error shows the table with an arrow."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from megaasync.schedules.action import COMPUTE_OPS, Action, Op
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError
from megaasync.schedules.unroll import unroll_all

Table = list[list[Action]]


def show_with_arrow(actions: list[Action], index: int, *, around: int = 6) -> str:
    """The neighbourhood of one action of a rank's list, with an arrow at it."""
    first = max(index - around, 0)
    lines = [
        f"    {action}{'   <-- here' if position == index else ''}"
        for position, action in enumerate(actions[first : index + around + 1], start=first)
    ]
    return "\n".join(lines)


def _fail(table: Table, rank: int, index: int, rule: str, why: str) -> None:
    raise ScheduleError(f"{rule}: {why}\nrank {rank}:\n{show_with_arrow(table[rank], index)}")


def _positions(table: Table) -> Iterator[tuple[int, int, Action]]:
    for rank, actions in enumerate(table):
        for index, action in enumerate(actions):
            yield rank, index, action


def check_complete(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """Each (stage, step, microbatch) has one F and one B, or I and W; each (stage, step) one REDUCE_GRAD and STEP."""
    seen: dict[Action, int] = {}
    for rank, index, action in _positions(table):
        if action in seen:
            _fail(table, rank, index, "complete", f"{action} stands twice")
        seen[action] = rank
    ops = (Op.F, Op.I, Op.W) if schedule.splits_backward else (Op.F, Op.B)
    for stage in range(schedule.num_stages):
        for step in steps:
            wanted = [Action(op, stage, step, mb) for op in ops for mb in range(schedule.num_microbatches)]
            for action in [*wanted, Action(Op.REDUCE_GRAD, stage, step), Action(Op.STEP, stage, step)]:
                if action not in seen:
                    raise ScheduleError(f"complete: {action} is missing")


def check_placed(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """An action stands on the rank that holds its stage."""
    for rank, index, action in _positions(table):
        if schedule.rank_of_stage[action.stage] != rank:
            _fail(table, rank, index, "placed", f"{action} belongs to rank {schedule.rank_of_stage[action.stage]}")


def check_ordered(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """F before B or I before W of a microbatch; all gradients of a step before REDUCE_GRAD; that before STEP."""
    gradients = (Op.I, Op.W) if schedule.splits_backward else (Op.B,)
    for rank, actions in enumerate(table):
        seen: set[Action] = set()
        for index, action in enumerate(actions):
            stage, step = action.stage, action.step
            needs = []
            if action.op in (Op.B, Op.I):
                needs = [Action(Op.F, stage, step, action.microbatch)]
            elif action.op is Op.W:
                needs = [Action(Op.I, stage, step, action.microbatch)]
            elif action.op is Op.REDUCE_GRAD:
                needs = [Action(op, stage, step, mb) for op in gradients for mb in range(schedule.num_microbatches)]
            elif action.op is Op.STEP:
                needs = [Action(Op.REDUCE_GRAD, stage, step)]
            for need in needs:
                if step in steps and need not in seen:
                    _fail(table, rank, index, "ordered", f"{action} needs {need}, which is not done before it")
            seen.add(action)


def check_versioned(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """The version that a step uses was made by an earlier STEP on the same rank."""
    for rank, actions in enumerate(table):
        newest = {stage: schedule.version(stage=stage, step=steps.start) for stage in schedule.stages_of(rank)}
        for index, action in enumerate(actions):
            if action.op is Op.STEP:
                newest[action.stage] = action.step + 1
            elif action.op in COMPUTE_OPS:
                need = schedule.version(stage=action.stage, step=action.step)
                if need > newest[action.stage]:
                    why = f"{action} needs weight version {need}, which {action.stage}S{need - 1} makes only later"
                    _fail(table, rank, index, "versioned", why)


def check_fits(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """A rank holds no more activations than the schedule says, and no STEP writes over a version in use."""
    closing = Op.W if schedule.splits_backward else Op.B
    for rank, actions in enumerate(table):
        alive: set[tuple[int, int, int | None]] = set()
        for index, action in enumerate(actions):
            key = (action.stage, action.step, action.microbatch)
            if action.op is Op.F:
                alive.add(key)
                if len(alive) > schedule.in_flight[rank]:
                    why = (
                        f"{action} is activation number {len(alive)}, more than the {schedule.in_flight[rank]} allowed"
                    )
                    _fail(table, rank, index, "fits", why)
            elif action.op is closing:
                alive.discard(key)
            elif action.op is Op.STEP:
                slots = schedule.num_versions[action.stage]
                for stage, step, microbatch in alive:
                    used = schedule.version(stage=stage, step=step)
                    if stage == action.stage and (action.step + 1 - used) % slots == 0:
                        why = f"{action} writes over version {used}, which {stage}F{step}.{microbatch} still needs"
                        _fail(table, rank, index, "fits", why)


def messages(schedule: PipelineSchedule, op: Op, sender: int, actions: list[Action]) -> dict[int, list[Action]]:
    """What a rank's F (forward) or B and I (backward) actions send to other ranks, by receiving rank, in order.

    A message is named by the action that takes it.
    """
    offset = 1 if op is Op.F else -1
    sent: dict[int, list[Action]] = defaultdict(list)
    for action in actions:
        same_way = action.op is Op.F if op is Op.F else action.op in (Op.B, Op.I)
        stage = action.stage + offset
        if not same_way or not 0 <= stage < schedule.num_stages:
            continue
        receiver = schedule.rank_of_stage[stage]
        if receiver != sender:
            sent[receiver].append(Action(action.op, stage, action.step, action.microbatch))
    return sent


def check_fifo(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """Between two ranks, messages of one direction are received in the order in which they are sent."""
    for op, offset in ((Op.F, 1), (Op.B, -1)):
        for sender, actions in enumerate(table):
            for receiver, sent in messages(schedule, op, sender, actions).items():
                taken = [
                    action
                    for action in table[receiver]
                    if (action.op is Op.F if op is Op.F else action.op in (Op.B, Op.I))
                    and 0 <= action.stage - offset < schedule.num_stages
                    and schedule.rank_of_stage[action.stage - offset] == sender
                ]
                for number, (given, wanted) in enumerate(zip(sent, taken, strict=True)):
                    if given != wanted:
                        raise ScheduleError(
                            f"fifo: message {number} from rank {sender} is for {given}, but rank {receiver} wants that "
                            f"for {wanted}"
                        )


def waits_for(schedule: PipelineSchedule, action: Action) -> list[Action]:
    """Actions on other stages that must be done before this one can be.

    REDUCE_GRAD waits for nobody: what it couples is waited for by SYNC and STEP.
    """
    last = schedule.num_stages - 1
    step = action.step
    if action.op is Op.F and action.stage > 0:
        return [Action(Op.F, action.stage - 1, step, action.microbatch)]
    if action.op in (Op.B, Op.I) and action.stage < last:
        return [Action(action.op, action.stage + 1, step, action.microbatch)]
    if action.op is Op.SYNC or (action.op is Op.STEP and schedule.clip == "global"):
        return [Action(Op.REDUCE_GRAD, stage, step) for stage in range(schedule.num_stages)]
    return []


def check_live(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """No deadlock when every receive, and every STEP's wait for the global norm, blocks."""
    done: set[Action] = set()
    at = [0] * len(table)

    def ready(action: Action) -> bool:
        return all(need in done for need in waits_for(schedule, action) if need.step in steps)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table):
            while at[rank] < len(actions) and ready(actions[at[rank]]):
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    stuck = [f"rank {r} at {table[r][at[r]]}" for r in range(len(table)) if at[r] < len(table[r])]
    if stuck:
        raise ScheduleError("live: deadlock, " + ", ".join(stuck))


RULES: tuple[Callable[[PipelineSchedule, Table, range], None], ...] = (
    check_placed,
    check_complete,
    check_ordered,
    check_versioned,
    check_fits,
    check_fifo,
    check_live,
)


def check_table(schedule: PipelineSchedule, table: Table, *, steps: range) -> None:
    """Apply every rule to an unrolled table of all ranks that covers `steps` and ends flushed.

    Raises:
        ScheduleError: names the rule and shows the place.
    """
    for rule in RULES:
        rule(schedule, table, steps)


def check(schedule: PipelineSchedule, *, num_steps: int = 4) -> None:
    """Unroll a few steps of the schedule and apply every rule.

    Raises:
        ScheduleError: names the rule and shows the place.
    """
    first = schedule.start_step
    table = unroll_all(schedule, num_steps=num_steps, first_step=first)
    check_table(schedule, table, steps=range(first, first + num_steps))
