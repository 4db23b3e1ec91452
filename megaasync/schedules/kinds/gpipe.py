"""GPipe: all forwards of a step, then all backwards."""

from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.orders import flushed_schedule
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
    return flushed_schedule("gpipe", num_ranks, num_microbatches, aheads=[num_microbatches] * num_ranks)


SCHEDULE = ScheduleKind("gpipe", gpipe)
