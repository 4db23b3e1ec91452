"""A run as phases: synchronous start, asynchronous middle, synchronous cooldown; one schedule each."""

from dataclasses import dataclass

from megaasync.schedules.catalog import SCHEDULES, build_schedule
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError


@dataclass(frozen=True, slots=True)
class Phase:
    """A run of steps under one schedule.

    Attributes:
        schedule: its tables; `schedule.start_step` is `first_step`.
        first_step, end_step: 0-based, the end not included.
        flush_at_end: another phase follows, so the gradients that the delay leaves pending are applied at the end.
    """

    schedule: PipelineSchedule
    first_step: int
    end_step: int
    flush_at_end: bool

    def lookahead_steps(self, *, stage: int, step: int) -> int:
        """Updates that a correction looks ahead when STEP(`step`) publishes `stage`'s weights.

        The delay; but none for the version that the next phase starts from.
        """
        is_handed_on = self.flush_at_end and step == self.end_step - 1
        return 0 if is_handed_on else self.schedule.delay[stage]


def make_phases(
    name: str,
    *,
    num_steps: int,
    sync_start_steps: int,
    sync_cooldown_steps: int,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int | None,
    extra_in_flight: int,
    tied: bool,
    delay: tuple[int, ...] | None = None,
) -> tuple[Phase, ...]:
    """The phases of a run of `num_steps` steps; empty ones are left out.

    Raises:
        ScheduleError: a schedule is not defined for these sizes, or has no delay to be switched off.
    """
    kind = SCHEDULES[name]
    if (sync_start_steps or sync_cooldown_steps) and not kind.has_delay:
        raise ScheduleError(
            f"{name} is synchronous all the time",
            remedy="schedule.sync_start_steps=0 schedule.sync_cooldown_steps=0",
        )
    asynchronous = num_steps - sync_start_steps - sync_cooldown_steps
    if kind.has_delay and asynchronous < 1:
        raise ScheduleError(
            f"schedule.sync_start_steps={sync_start_steps} and schedule.sync_cooldown_steps={sync_cooldown_steps} "
            f"leave no step of train.steps={num_steps} to {name}",
            remedy=f"train.steps={sync_start_steps + sync_cooldown_steps + 1} or more, or fewer synchronous steps",
        )
    runs = ((kind.synchronous, sync_start_steps), (name, asynchronous), (kind.synchronous, sync_cooldown_steps))
    phases, first = [], 0
    for run, length in runs:
        if not length:
            continue
        schedule = build_schedule(
            run,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
            extra_in_flight=extra_in_flight,
            tied=tied,
            start_step=first,
            delay=delay if run == name else None,
        )
        phases.append(Phase(schedule, first, first + length, flush_at_end=first + length < num_steps))
        first += length
    return tuple(phases)
