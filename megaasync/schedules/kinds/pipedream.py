"""PipeDream with weight stashing: an update per microbatch, a delay per stage."""

from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.orders import unflushed_schedule
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError


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
    return unflushed_schedule("pipedream", num_ranks, 1, delays=delays, extra=0, clip="stage")


SCHEDULE = ScheduleKind("pipedream", pipedream, has_delay=True, synchronous="1f1b")
