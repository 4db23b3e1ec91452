"""The schedules by the names that users type, and what each of them takes."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from megaasync.schedules.asynchronous import interleaved_2bw, pipedream, pipedream_2bw, wpipe
from megaasync.schedules.rules import check
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError
from megaasync.schedules.synchronous import gpipe, interleaved_1f1b, one_f_one_b
from megaasync.schedules.zero_bubble import zb_h1, zbv


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """One schedule.

    Attributes:
        build: (num_ranks, num_microbatches, virtual_stages, extra_in_flight) to the tables.
        virtual_stages: (fewest, most) stages per rank; the fewest is the default.
        takes_extra_in_flight: whether forwards beyond the minimum are defined for it.
        has_delay: whether any stage runs behind.
        synchronous: for one with delay, the schedule of equal placement that its synchronous phases use.
    """

    build: Callable[..., PipelineSchedule]
    virtual_stages: tuple[int, int] = (1, 1)
    takes_extra_in_flight: bool = False
    has_delay: bool = False
    synchronous: str | None = None


_MANY = 1_000
SCHEDULES = {
    "gpipe": ScheduleKind(gpipe),
    "1f1b": ScheduleKind(one_f_one_b, takes_extra_in_flight=True),
    "interleaved_1f1b": ScheduleKind(interleaved_1f1b, (2, _MANY), takes_extra_in_flight=True),
    "zb_h1": ScheduleKind(zb_h1),
    "zbv": ScheduleKind(zbv, (2, 2)),
    "2bw": ScheduleKind(pipedream_2bw, takes_extra_in_flight=True, has_delay=True, synchronous="1f1b"),
    "interleaved_2bw": ScheduleKind(
        interleaved_2bw, (2, _MANY), takes_extra_in_flight=True, has_delay=True, synchronous="interleaved_1f1b"
    ),
    "pipedream": ScheduleKind(pipedream, has_delay=True, synchronous="1f1b"),
    "wpipe": ScheduleKind(wpipe, (2, 2), has_delay=True, synchronous="interleaved_1f1b"),
}


@functools.lru_cache(maxsize=64)
def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int | None = None,
    extra_in_flight: int = 0,
    tied: bool = False,
    start_step: int = 0,
    delay: tuple[int, ...] | None = None,
) -> PipelineSchedule:
    """A schedule by name. Tables are values, so the same request gets the same one.

    Args:
        name: a key of SCHEDULES.
        num_ranks: P.
        num_microbatches: per step, m.
        virtual_stages: stages per rank; None takes the fewest that the schedule is defined for.
        extra_in_flight: rounds of forwards ahead beyond the minimum.
        tied: the first and the last stage share their embedding.
        start_step: step at which the phase begins that this schedule is used in.
        delay: of each stage, in place of the schedule's own; on one rank only.

    Raises:
        ScheduleError: the schedule is not defined for these sizes, or a delay is shorter than its order needs.
    """
    kind = SCHEDULES[name]
    fewest, most = kind.virtual_stages
    virtual_stages = fewest if virtual_stages is None else virtual_stages
    if not fewest <= virtual_stages <= most:
        allowed = f"{fewest} stage(s)" if fewest == most else f"{fewest} or more stages"
        raise ScheduleError(
            f"{name} has {allowed} per rank, not {virtual_stages}", remedy=f"parallel.virtual_stages={fewest}"
        )
    if extra_in_flight and not kind.takes_extra_in_flight:
        takers = ", ".join(key for key, one in SCHEDULES.items() if one.takes_extra_in_flight)
        raise ScheduleError(f"{name} has no extra forwards in flight; {takers} do", remedy="schedule.extra_in_flight=0")
    schedule = kind.build(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
        extra_in_flight=extra_in_flight,
    )
    if tied and schedule.num_stages > 1 and schedule.clip == "stage":
        raise ScheduleError(
            f"{schedule.name} cannot tie the embeddings: their gradients come from the first and the last stage, whose "
            "updates are steps apart, and waiting for both would stop the pipeline",
            remedy="model.tie_embeddings=false",
        )
    schedule = replace(schedule, start_step=start_step, is_tied=tied and schedule.num_stages > 1)
    return schedule if delay is None else _with_delay(schedule, delay)


def _with_delay(schedule: PipelineSchedule, delay: tuple[int, ...]) -> PipelineSchedule:
    if schedule.num_ranks != 1 or not SCHEDULES[schedule.name].has_delay:
        raise ScheduleError(
            f"schedule.delay={list(delay)} is for studies on one rank, with 2bw for one stage or interleaved_2bw for "
            f"several, not for {schedule.name} on {schedule.num_ranks}",
            remedy="schedule.delay=null",
        )
    if len(delay) != schedule.num_stages:
        several = f"schedule=interleaved_2bw parallel.virtual_stages={len(delay)}"
        raise ScheduleError(
            f"schedule.delay={list(delay)} has {len(delay)} delays for {schedule.num_stages} stage(s)",
            remedy="schedule=2bw" if len(delay) == 1 else several,
        )
    # forwards run ahead of the last backward everywhere but on the last stage
    if min(delay) < 0 or 0 in delay[:-1]:
        raise ScheduleError(
            f"schedule.delay={list(delay)}: every stage but the last one needs a delay of at least 1",
            remedy="schedule=1f1b schedule.delay=null for no delay at all",
        )
    schedule = replace(schedule, delay=delay)
    check(schedule)
    return schedule
