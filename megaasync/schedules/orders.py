"""Orders of forwards and backwards that the schedules are put together from.

A stream is two sequences, of forwards and of backwards, and a number of forwards that run ahead: forward number
ahead + k stands just before backward number k.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from megaasync.schedules.action import Action, Op
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError


def one_f_one_b_order(forwards: Sequence[Action], backwards: Sequence[Action], *, ahead: int) -> list[Action]:
    """One batch from an empty to an empty pipeline: `ahead` forwards, then in turns, then the backwards that are left.

    `backwards` may be longer than `forwards`.
    """
    order = list(forwards[:ahead])
    for k, backward in enumerate(backwards):
        order += forwards[ahead + k : ahead + k + 1]
        order.append(backward)
    return order


def steady_one_f_one_b_order(
    forwards: Sequence[Action], backwards: Sequence[Action], *, ahead: int
) -> tuple[list[Action], list[Action]]:
    """(fill, one step) of a stream that is never flushed; the sequences are those of one step, of step 0.

    Forwards of step 0 that run `ahead` backwards early become forwards of a later relative step.
    """

    def forward(number: int) -> Action:
        step, index = divmod(number, len(forwards))
        action = forwards[index]
        return Action(action.op, action.stage, action.step + step, action.microbatch)

    fill = [forward(k) for k in range(ahead)]
    steady = []
    for k, backward in enumerate(backwards):
        steady += [forward(ahead + k), backward]
    return fill, steady


def append_reduce(order: Iterable[Action], stages: Iterable[int]) -> tuple[Action, ...]:
    """The order with each stage's REDUCE_GRAD of step 0 right after its last gradient."""
    order = list(order)
    for stage in stages:
        last = max(i for i, action in enumerate(order) if action.stage == stage and action.op in (Op.B, Op.I, Op.W))
        order.insert(last + 1, Action(Op.REDUCE_GRAD, stage, 0))
    return tuple(order)


def chunked(
    name: str, op: Op, *, rank: int, num_ranks: int, virtual_stages: int, num_microbatches: int
) -> list[Action]:
    """The order in which a rank takes its chunks (Megatron-LM's interleaving, arXiv 2104.04473).

    Groups of P microbatches pass through chunk 0, 1, ... (backwards: in reverse) before the next group.

    Raises:
        ScheduleError: the microbatches do not make whole groups.
    """
    if num_microbatches % num_ranks:
        raise ScheduleError(
            f"{name} takes microbatches in groups of P = {num_ranks}, and m = {num_microbatches} "
            "microbatches per step do not make whole groups",
            wanted_microbatches=-(-num_microbatches // num_ranks) * num_ranks,
        )
    order = []
    for first in range(0, num_microbatches, num_ranks):
        for chunk in range(virtual_stages) if op is Op.F else reversed(range(virtual_stages)):
            order += [Action(op, chunk * num_ranks + rank, 0, first + k) for k in range(num_ranks)]
    return order


def check_extra(name: str, *, num_ranks: int, extra_in_flight: int) -> None:
    """Interleaved orders have a limit to how far ahead a rank can run.

    Forward number k of a later chunk needs the last rank's forward k - P, which that rank reaches before its first
    backward only within the first two groups.

    Raises:
        ScheduleError: the first rank would wait for itself.
    """
    if (1 + extra_in_flight) * (num_ranks - 1) > 2 * num_ranks:
        raise ScheduleError(
            f"{name} with P = {num_ranks} cannot have extra_in_flight = {extra_in_flight}: (1 + e)(P - 1) = "
            f"{(1 + extra_in_flight) * (num_ranks - 1)} forwards ahead are more than 2P = {2 * num_ranks}, and the "
            "first rank would wait for a later chunk of its own; at most 1 always works",
            remedy="schedule.extra_in_flight=1",
        )


def round_robin_schedule(
    name: str,
    *,
    num_ranks: int,
    virtual_stages: int,
    num_microbatches: int,
    delay: Sequence[int],
    steady: Sequence[tuple[Action, ...]],
    in_flight: Sequence[int],
    fill: Sequence[tuple[Action, ...]] | None = None,
    clip: Literal["global", "stage"] = "global",
) -> PipelineSchedule:
    """A schedule whose stage s is on rank s mod P; the arguments are PipelineSchedule's."""
    return PipelineSchedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_ranks * virtual_stages,
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(stage % num_ranks for stage in range(num_ranks * virtual_stages)),
        delay=tuple(delay),
        fill=((),) * num_ranks if fill is None else tuple(fill),
        steady=tuple(steady),
        in_flight=tuple(in_flight),
        clip=clip,
    )


def flushed_schedule(name: str, num_ranks: int, num_microbatches: int, *, aheads: Sequence[int]) -> PipelineSchedule:
    """One stage per rank, a flush every step; rank r runs `aheads[r]` forwards before its first backward."""
    steady = []
    for rank, ahead in enumerate(aheads):
        forwards, backwards = ([Action(op, rank, 0, k) for k in range(num_microbatches)] for op in (Op.F, Op.B))
        steady.append(append_reduce(one_f_one_b_order(forwards, backwards, ahead=ahead), [rank]))
    return round_robin_schedule(
        name,
        num_ranks=num_ranks,
        virtual_stages=1,
        num_microbatches=num_microbatches,
        delay=(0,) * num_ranks,
        steady=steady,
        in_flight=[min(ahead + 1, num_microbatches) for ahead in aheads],
    )


def unflushed_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    delays: Sequence[int],
    extra: int,
    clip: Literal["global", "stage"] = "global",
) -> PipelineSchedule:
    """One stage per rank, 1F1B never flushed; rank r runs (1 + extra)(P-1-r) forwards ahead and is `delays[r]` behind.

    Raises:
        ScheduleError: too few microbatches for that many forwards ahead.
    """
    fills, steady, limits = [], [], []
    for rank in range(num_ranks):
        ahead = (1 + extra) * (num_ranks - 1 - rank)
        check_depth(
            name,
            ahead,
            num_microbatches * delays[rank],
            bound=f"{1 + extra}(P - 1)" if extra else "P - 1",
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
        )
        forwards, backwards = ([Action(op, rank, 0, k) for k in range(num_microbatches)] for op in (Op.F, Op.B))
        fill, step = steady_one_f_one_b_order(forwards, backwards, ahead=ahead)
        fills.append(tuple(fill))
        steady.append(append_reduce(step, [rank]))
        limits.append(ahead + 1)
    return round_robin_schedule(
        name,
        num_ranks=num_ranks,
        virtual_stages=1,
        num_microbatches=num_microbatches,
        delay=delays,
        steady=steady,
        in_flight=limits,
        fill=fills,
        clip=clip,
    )


def check_depth(
    name: str, ahead: int, most: int, *, bound: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> None:
    """Refuse forwards so far ahead that they need a weight version whose gradient is not finished yet.

    Args:
        name: of the schedule.
        ahead: forwards that the first rank runs ahead of its backwards.
        most: forwards that its delay allows.
        bound: what m must at least be, in symbols.
        num_ranks: P.
        num_microbatches: m.
        virtual_stages: stages per rank.

    Raises:
        ScheduleError: `ahead` is more than `most`.
    """
    if ahead > most:
        needed = -(-ahead // virtual_stages)
        if virtual_stages > 1:
            needed = -(-needed // num_ranks) * num_ranks
        raise ScheduleError(
            f"{name} needs m >= {bound} = {needed} microbatches per step for P = {num_ranks}, but m = "
            f"{num_microbatches}: the first rank runs {ahead} forwards ahead, so with fewer it would need a weight "
            "version whose gradient it has not finished yet, and wait for itself (a deadlock)",
            wanted_microbatches=needed,
        )
