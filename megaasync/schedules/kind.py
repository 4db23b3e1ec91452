"""What the catalog knows about a schedule."""

from collections.abc import Callable
from dataclasses import dataclass

from megaasync.schedules.schedule import PipelineSchedule


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """One schedule.

    Attributes:
        name: what users type.
        build: (num_ranks, num_microbatches, virtual_stages, extra_in_flight) to the tables.
        virtual_stages: (fewest, most) stages per rank; the fewest is the default, None is no bound.
        takes_extra_in_flight: whether forwards beyond the minimum are defined for it.
        has_delay: whether any stage runs behind.
        synchronous: for one with delay, the schedule of equal placement that its synchronous phases use.
    """

    name: str
    build: Callable[..., PipelineSchedule]
    virtual_stages: tuple[int, int | None] = (1, 1)
    takes_extra_in_flight: bool = False
    has_delay: bool = False
    synchronous: str | None = None
