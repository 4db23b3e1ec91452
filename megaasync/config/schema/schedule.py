"""Pipeline schedules and corrections of the delay: groups `schedule` and `correction`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaasync.fields import NameOf, Range
from megaasync.schedules import SCHEDULES


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Pipeline schedule by name; see `megaasync.schedules.SCHEDULES`.

    Attributes:
        sync_start_steps, sync_cooldown_steps: steps at the start and the end that run without delay, under the
            synchronous schedule of the same placement.
        extra_in_flight: rounds of forwards ahead beyond the minimum; 1 hides the latency of a hop between stages.
        overlap_step: reduction, norm and optimizer step run beside forwards and backwards; false exposes them.
        delay: of each stage, in place of the schedule's own, for studies on one rank: 2bw with one stage, or
            interleaved_2bw with parallel.virtual_stages of them; null for the schedule's own.
    """

    name: Annotated[str, NameOf(tuple(SCHEDULES))]
    sync_start_steps: Annotated[int, Range(at_least=0)]
    sync_cooldown_steps: Annotated[int, Range(at_least=0)]
    extra_in_flight: Annotated[int, Range(at_least=0)]
    overlap_step: bool
    delay: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class NoCorrection:
    """Nothing is done against the delay."""

    name: Literal["none"]


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Forward and backward run at weights that look as many updates ahead as are missing: z - d u."""

    name: Literal["error_feedback"]


@dataclass(frozen=True, slots=True)
class Taylor:
    """DC-ASGD (arXiv 1609.08326): g + strength g g (w_now - w_then) after clipping.

    Attributes:
        strength: lambda.
        adaptive: divide it by the root of g's mean square.
    """

    name: Literal["taylor"]
    strength: Annotated[float, Range(at_least=0)]
    adaptive: bool


CorrectionConfig = NoCorrection | ErrorFeedback | Taylor
