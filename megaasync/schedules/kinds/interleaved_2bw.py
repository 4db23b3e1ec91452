"""Interleaved 2BW: several chunks per rank, never flushed, with two weight versions."""

from megaasync.schedules.action import Op
from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.orders import (
    append_reduce,
    check_depth,
    check_extra,
    chunked,
    round_robin_schedule,
    steady_one_f_one_b_order,
)
from megaasync.schedules.schedule import PipelineSchedule


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
        check_depth(
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


SCHEDULE = ScheduleKind(
    "interleaved_2bw",
    interleaved_2bw,
    (2, None),
    takes_extra_in_flight=True,
    has_delay=True,
    synchronous="interleaved_1f1b",
)
