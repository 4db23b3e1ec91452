"""Schedules that empty the pipeline every step: `gpipe`, `1f1b`, `interleaved_1f1b`. Delay 0, one weight version."""

from megaasync.schedules.action import Action, Op
from megaasync.schedules.orders import append_reduce, check_extra, chunked, one_f_one_b_order, round_robin_schedule
from megaasync.schedules.schedule import PipelineSchedule


def gpipe(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1, extra_in_flight: int = 0
) -> PipelineSchedule:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards; bubble (P-1)/(m+P-1), m activations.

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(gpipe(num_ranks=3, num_microbatches=3), num_steps=1))
        rank 0 |F0a F0b F0c .   .   .   .   .   .   B0a --- B0b --- B0c ---
        rank 1 |.   F0a F0b F0c .   .   .   B0a --- B0b --- B0c ---
        rank 2 |.   .   F0a F0b F0c B0a --- B0b --- B0c ---
    """
    return _one_chunk("gpipe", num_ranks, num_microbatches, aheads=[num_microbatches] * num_ranks)


def one_f_one_b(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1, extra_in_flight: int = 0
) -> PipelineSchedule:
    """1F1B (arXiv 1806.03377, 2104.04473) with a flush every step; bubble (P-1)/(m+P-1), P - s activations.

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(one_f_one_b(num_ranks=3, num_microbatches=3), num_steps=1))
        rank 0 |F0a F0b F0c .   .   .   .   B0a --- .   B0b --- .   B0c ---
        rank 1 |.   F0a F0b .   .   B0a --- F0c B0b --- .   B0c ---
        rank 2 |.   .   F0a B0a --- F0b B0b --- F0c B0c ---
    """
    aheads = [min((1 + extra_in_flight) * (num_ranks - 1 - rank), num_microbatches) for rank in range(num_ranks)]
    return _one_chunk("1f1b", num_ranks, num_microbatches, aheads=aheads)


def _one_chunk(name: str, num_ranks: int, num_microbatches: int, *, aheads: list[int]) -> PipelineSchedule:
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
