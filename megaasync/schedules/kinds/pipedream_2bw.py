"""PipeDream-2BW: 1F1B that is never flushed, with two weight versions."""

from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.orders import unflushed_schedule
from megaasync.schedules.schedule import PipelineSchedule


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
    return unflushed_schedule("2bw", num_ranks, num_microbatches, delays=[1] * num_ranks, extra=extra_in_flight)


SCHEDULE = ScheduleKind("2bw", pipedream_2bw, takes_extra_in_flight=True, has_delay=True, synchronous="1f1b")
