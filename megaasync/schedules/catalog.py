"""The schedules by the names that users type: every module of `kinds` has one."""

import functools
import importlib
import pkgutil
from dataclasses import replace

from megaasync.schedules import kinds
from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.rules import check
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError


def _all() -> dict[str, ScheduleKind]:
    modules = (
        importlib.import_module(f"{kinds.__name__}.{module.name}") for module in pkgutil.iter_modules(kinds.__path__)
    )
    found: list[ScheduleKind] = [module.SCHEDULE for module in modules]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: (kind.has_delay, kind.name))}


SCHEDULES = _all()


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
    if virtual_stages < fewest or (most is not None and virtual_stages > most):
        allowed = f"{fewest} stage(s)" if fewest == most else f"{fewest} or more stages"
        raise ScheduleError(
            f"{name} has {allowed} per rank, not {virtual_stages}", remedy=f"parallel.virtual_stages={fewest}"
        )
    if extra_in_flight and not kind.takes_extra_in_flight:
        takers = ", ".join(key for key, other in SCHEDULES.items() if other.takes_extra_in_flight)
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
