"""1F1B: one forward, one backward, with a flush every step."""

from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.orders import flushed_schedule
from megaasync.schedules.schedule import PipelineSchedule


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
    return flushed_schedule("1f1b", num_ranks, num_microbatches, aheads=aheads)


SCHEDULE = ScheduleKind("1f1b", one_f_one_b, takes_extra_in_flight=True)
