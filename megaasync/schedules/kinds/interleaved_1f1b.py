"""Interleaved 1F1B: several chunks per rank, with a flush every step."""

from megaasync.schedules.action import Op
from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.orders import append_reduce, check_extra, chunked, one_f_one_b_order, round_robin_schedule
from megaasync.schedules.schedule import PipelineSchedule


def interleaved_1f1b(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 2, extra_in_flight: int = 0
) -> PipelineSchedule:
    """Interleaved 1F1B (arXiv 2104.04473): v chunks per rank, stage s on rank s mod P; bubble (P-1)/(vm+P-1).

    Raises:
        ScheduleError: m is not a multiple of P.

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(interleaved_1f1b(num_ranks=2, num_microbatches=2, virtual_stages=2), num_steps=1))
        rank 0 |F0a  F0b  F0a' F0b' .    .    B0a' ---  .    B0b' ---  B0a  ---  B0b  ---
        rank 1 |.    F0a  F0b  F0a' B0a' ---  F0b' B0b' ---  B0a  ---  B0b  ---
    """
    check_extra("interleaved_1f1b", num_ranks=num_ranks, extra_in_flight=extra_in_flight)
    steady, limits = [], []
    for rank in range(num_ranks):
        size = {
            "rank": rank,
            "num_ranks": num_ranks,
            "virtual_stages": virtual_stages,
            "num_microbatches": num_microbatches,
        }
        ahead = min(
            (virtual_stages - 1) * num_ranks + (1 + extra_in_flight) * (num_ranks - 1 - rank),
            virtual_stages * num_microbatches,
        )
        order = one_f_one_b_order(
            chunked("interleaved_1f1b", Op.F, **size), chunked("interleaved_1f1b", Op.B, **size), ahead=ahead
        )
        steady.append(append_reduce(order, range(rank, num_ranks * virtual_stages, num_ranks)))
        limits.append(min(ahead + 1, virtual_stages * num_microbatches))
    return round_robin_schedule(
        "interleaved_1f1b",
        num_ranks=num_ranks,
        virtual_stages=virtual_stages,
        num_microbatches=num_microbatches,
        delay=(0,) * (num_ranks * virtual_stages),
        steady=steady,
        in_flight=limits,
    )


SCHEDULE = ScheduleKind("interleaved_1f1b", interleaved_1f1b, (2, None), takes_extra_in_flight=True)
