"""Schedules that never empty the pipeline, or not for all stages: `2bw`, `interleaved_2bw`, `pipedream`, `wpipe`."""

from typing import Literal

from megaasync.schedules.action import Action, Op
from megaasync.schedules.orders import (
    append_reduce,
    check_extra,
    chunked,
    one_f_one_b_order,
    round_robin_schedule,
    steady_one_f_one_b_order,
)
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError


def pipedream_2bw(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1, extra_in_flight: int = 0
) -> PipelineSchedule:
    """PipeDream-2BW (arXiv 2006.09503): 1F1B without a flush, two weight versions, constant delay 1; bubble 0.

    Stage s runs (1+e)(P-1-s) forwards ahead, e being `extra_in_flight`.

    Raises:
        ScheduleError: m < (1+e)(P-1), for which the order deadlocks (docs/method.md, depth rule).

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(pipedream_2bw(num_ranks=3, num_microbatches=3), num_steps=2))
        rank 0 |F0a F0b F0c .   .   .   .   B0a --- F1a B0b --- F1b B0c --- F1c B1a --- .   B1b --- .   B1c ---
        rank 1 |.   F0a F0b .   .   B0a --- F0c B0b --- F1a B0c --- F1b B1a --- F1c B1b --- .   B1c ---
        rank 2 |.   .   F0a B0a --- F0b B0b --- F0c B0c --- F1a B1a --- F1b B1b --- F1c B1c ---
    """
    return _stream("2bw", num_ranks, num_microbatches, delays=[1] * num_ranks, extra=extra_in_flight)


def pipedream(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1, extra_in_flight: int = 0
) -> PipelineSchedule:
    """PipeDream with weight stashing (arXiv 1806.03377): one update per microbatch, delay P-1-s, P-s versions.

    Each stage clips by its own norm: with the global one, a fresh last stage would wait for stage 0 (docs/method.md,
    what couples stages).

    Raises:
        ScheduleError: m is not 1.

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(pipedream(num_ranks=3, num_microbatches=1), num_steps=4))
        rank 0 |F0a F1a F2a .   .   .   .   B0a --- F3a B1a --- .   B2a --- .   B3a ---
        rank 1 |.   F0a F1a .   .   B0a --- F2a B1a --- F3a B2a --- .   B3a ---
        rank 2 |.   .   F0a B0a --- F1a B1a --- F2a B2a --- F3a B3a ---
    """
    if num_microbatches != 1:
        raise ScheduleError(
            "pipedream updates after every microbatch and is defined for m = 1 microbatch per step only, but "
            f"m = {num_microbatches}",
            wanted_microbatches=1,
        )
    delays = [num_ranks - 1 - rank for rank in range(num_ranks)]
    return _stream("pipedream", num_ranks, 1, delays=delays, extra=0, clip="stage")


def _stream(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    delays: list[int],
    extra: int,
    clip: Literal["global", "stage"] = "global",
) -> PipelineSchedule:
    fills, steady, limits = [], [], []
    for rank in range(num_ranks):
        ahead = (1 + extra) * (num_ranks - 1 - rank)
        _check_depth(
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


def _check_depth(
    name: str, ahead: int, most: int, *, bound: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> None:
    """Refuse forwards so far ahead that they need a weight version whose gradient is not finished yet."""
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


def interleaved_2bw(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 2, extra_in_flight: int = 0
) -> PipelineSchedule:
    """The interleaved order without a flush, two weight versions, constant delay 1; bubble 0.

    Chunks shorten fill and drain, not the steady state, which has no bubble anyway.

    Raises:
        ScheduleError: m is not a multiple of P, or too small for the forwards that run ahead.

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(interleaved_2bw(num_ranks=2, num_microbatches=2, virtual_stages=2), num_steps=2))
        rank 0 |F0a  F0b  F0a' F0b' .    .    B0a' ---  F1a  B0b' ---  F1b  B0a  ---  F1a' B0b  ---  F1b' B1a' ---  .    B1b' ---  B1a  ---  B1b  ---
        rank 1 |.    F0a  F0b  F0a' B0a' ---  F0b' B0b' ---  F1a  B0a  ---  F1b  B0b  ---  F1a' B1a' ---  F1b' B1b' ---  B1a  ---  B1b  ---
    """  # noqa: E501 - the picture
    check_extra("interleaved_2bw", num_ranks=num_ranks, extra_in_flight=extra_in_flight)
    fills, steady, limits = [], [], []
    for rank in range(num_ranks):
        size = {
            "rank": rank,
            "num_ranks": num_ranks,
            "virtual_stages": virtual_stages,
            "num_microbatches": num_microbatches,
        }
        ahead = (virtual_stages - 1) * num_ranks + (1 + extra_in_flight) * (num_ranks - 1 - rank)
        forwards, backwards = chunked("interleaved_2bw", Op.F, **size), chunked("interleaved_2bw", Op.B, **size)
        _check_depth(
            "interleaved_2bw",
            ahead,
            len(forwards),
            bound="the multiple of P at or above ((v - 1)P + (1 + e)(P - 1)) / v",
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
        )
        fill, step = steady_one_f_one_b_order(forwards, backwards, ahead=ahead)
        fills.append(tuple(fill))
        steady.append(append_reduce(step, range(rank, num_ranks * virtual_stages, num_ranks)))
        limits.append(ahead + 1)
    return round_robin_schedule(
        "interleaved_2bw",
        num_ranks=num_ranks,
        virtual_stages=virtual_stages,
        num_microbatches=num_microbatches,
        delay=(1,) * (num_ranks * virtual_stages),
        steady=steady,
        in_flight=limits,
        fill=fills,
    )


def wpipe(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 2, extra_in_flight: int = 0
) -> PipelineSchedule:
    """WPipe (ICLR 2022), our reading: the model's first half (group 0, chunk 0) has delay 1, the second half delay 0.

    The published order was not available to us. Here each rank holds one stage of each group. In the window of step t
    it runs group 1's forwards of t, group 0's forwards of t + 1 (before this batch's backward, on weights that lack
    t's gradient), then backwards of t through group 1 and group 0. Group 0 needs two weight versions, group 1 one.
    Clipping by the global norm makes each window end with a flush of group 1, so its bubble is (P-1)/(2m+P-1).

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(wpipe(num_ranks=2, num_microbatches=2), num_steps=2))
        rank 0 |F0a  F0b  F0a' F0b' .    .    B0a' ---  F1a  B0b' ---  F1b  B0a  ---  .    B0b  ---  F1a' F1b' .    .    B1a' ---  .    B1b' ---  B1a  ---  B1b  ---
        rank 1 |.    F0a  F0b  F0a' B0a' ---  F0b' B0b' ---  F1a  B0a  ---  F1b  B0b  ---  .    .    .    F1a' B1a' ---  F1b' B1b' ---  B1a  ---  B1b  ---
    """  # noqa: E501 - the picture
    fills, steady, limits = [], [], []
    numbers = range(num_microbatches)
    for rank in range(num_ranks):
        first, second = rank, num_ranks + rank
        forwards = [Action(Op.F, second, 0, k) for k in numbers] + [Action(Op.F, first, 1, k) for k in numbers]
        backwards = [Action(Op.B, second, 0, k) for k in numbers] + [Action(Op.B, first, 0, k) for k in numbers]
        ahead = min(num_ranks - 1 - rank, 2 * num_microbatches)
        fills.append(tuple(Action(Op.F, first, 0, k) for k in numbers))
        steady.append(append_reduce(one_f_one_b_order(forwards, backwards, ahead=ahead), [first, second]))
        limits.append(num_microbatches + min(ahead + 1, 2 * num_microbatches))
    return round_robin_schedule(
        "wpipe",
        num_ranks=num_ranks,
        virtual_stages=2,
        num_microbatches=num_microbatches,
        delay=(1,) * num_ranks + (0,) * num_ranks,
        steady=steady,
        in_flight=limits,
        fill=fills,
    )
