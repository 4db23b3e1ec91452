"""The rules that every unrolled table must keep, one named function each; the error shows the table with an arrow."""

from collections.abc import Callable, Iterator

from megaasync.schedules.action import Action, Op
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError, unroll_all

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
    """Every (stage, step, microbatch) has one F and one B; every (stage, step) one NORM and one STEP."""
    seen: dict[Action, int] = {}
    for rank, index, action in _positions(table):
        if action in seen:
            _fail(table, rank, index, "complete", f"{action} stands twice")
        seen[action] = rank
    for stage in range(schedule.num_stages):
        for step in steps:
            wanted = [Action(op, stage, step, mb) for op in (Op.F, Op.B) for mb in range(schedule.num_microbatches)]
            for action in [*wanted, Action(Op.NORM, stage, step), Action(Op.STEP, stage, step)]:
                if action not in seen:
                    raise ScheduleError(f"complete: {action} is missing")


def check_placed(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """An action stands on the rank that holds its stage."""
    for rank, index, action in _positions(table):
        if schedule.rank_of_stage[action.stage] != rank:
            _fail(table, rank, index, "placed", f"{action} belongs to rank {schedule.rank_of_stage[action.stage]}")


def check_ordered(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """F before B of a microbatch; all B of a step before its NORM; NORM before STEP."""
    for rank, actions in enumerate(table):
        seen: set[Action] = set()
        for index, action in enumerate(actions):
            stage, step = action.stage, action.step
            needs = []
            if action.op is Op.B:
                needs = [Action(Op.F, stage, step, action.microbatch)]
            elif action.op is Op.NORM:
                needs = [Action(Op.B, stage, step, mb) for mb in range(schedule.num_microbatches)]
            elif action.op is Op.STEP:
                needs = [Action(Op.NORM, stage, step)]
            for need in needs:
                if step in steps and need not in seen:
                    _fail(table, rank, index, "ordered", f"{action} needs {need}, which is not done before it")
            seen.add(action)


def check_versioned(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """The version that a step uses was made by an earlier STEP on the same rank.

    That no newer one overwrote it follows from `ordered`: STEP t comes after every use of version t - delay.
    """
    for rank, actions in enumerate(table):
        newest = {stage: steps.start for stage in schedule.stages_of(rank)}
        for index, action in enumerate(actions):
            if action.op is Op.STEP:
                newest[action.stage] = action.step + 1
            elif action.op in (Op.F, Op.B):
                need = schedule.version(stage=action.stage, step=action.step)
                if need > newest[action.stage]:
                    why = f"{action} needs weight version {need}, which {action.stage}S{need - 1} makes only later"
                    _fail(table, rank, index, "versioned", why)


def _messages(table: Table, op: Op, stage: int) -> list[tuple[int, int | None]]:
    return [(a.step, a.microbatch) for actions in table for a in actions if a.op is op and a.stage == stage]


def check_fifo(schedule: PipelineSchedule, table: Table, steps: range) -> None:
    """Between neighbouring stages, messages are received in the order in which they are sent."""
    for stage in range(schedule.num_stages - 1):
        for op, sender, receiver in ((Op.F, stage, stage + 1), (Op.B, stage + 1, stage)):
            sent, received = _messages(table, op, sender), _messages(table, op, receiver)
            for number, (given, taken) in enumerate(zip(sent, received, strict=True)):
                if given != taken:
                    raise ScheduleError(
                        f"fifo: message {number} from stage {sender} is {op.value}{given[0]}.{given[1]}, but stage "
                        f"{receiver} wants {op.value}{taken[0]}.{taken[1]}"
                    )


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


def waits_for(schedule: PipelineSchedule, action: Action) -> list[Action]:
    """Actions on other stages that must be done before this one can be."""
    last = schedule.num_stages - 1
    if action.op is Op.F and action.stage > 0:
        return [Action(Op.F, action.stage - 1, action.step, action.microbatch)]
    if action.op is Op.B and action.stage < last:
        return [Action(Op.B, action.stage + 1, action.step, action.microbatch)]
    if action.op is Op.STEP:
        return [Action(Op.NORM, stage, action.step) for stage in range(schedule.num_stages)]
    return []


RULES: tuple[Callable[[PipelineSchedule, Table, range], None], ...] = (
    check_placed,
    check_ordered,
    check_versioned,
    check_complete,
    check_fifo,
    check_live,
)


def check_table(schedule: PipelineSchedule, table: Table, *, steps: range) -> None:
    """Apply every rule to an unrolled table of all ranks that covers `steps` and ends settled.

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
    check_table(schedule, unroll_all(schedule, num_steps=num_steps), steps=range(num_steps))
