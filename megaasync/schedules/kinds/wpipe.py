"""WPipe: the first half of the model one update behind, the second half not."""

from megaasync.schedules.action import Action, Op
from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.orders import append_reduce, one_f_one_b_order, round_robin_schedule
from megaasync.schedules.schedule import PipelineSchedule


def wpipe(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 2, extra_in_flight: int = 0
) -> PipelineSchedule:
    """WPipe (ICLR 2022), our reading: the model's first half (group 0, chunk 0) has delay 1, the second half delay 0.

    The published order was not available to us. Here each rank holds one stage of each group. In the window of step t
    it runs group 1's forwards of t, group 0's forwards of t + 1 (before this batch's backward, on weights that lack
    t's gradient), then backwards of t through group 1 and group 0. Group 0 needs two weight versions, group 1 one.
    Clipping by the global norm makes each window end with a flush of group 1, so its bubble is (P-1)/(2m+P-1).

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(wpipe(num_ranks=2, num_microbatches=2), num_steps=2))
        rank 0 |F0a  F0b  F0a' F0b' .    .    B0a' ---  F1a  B0b' ---  F1b  B0a  ---  .    B0b  ---  F1a' F1b' .    .    B1a' ---  .    B1b' ---  B1a  ---  B1b  ---
        rank 1 |.    F0a  F0b  F0a' B0a' ---  F0b' B0b' ---  F1a  B0a  ---  F1b  B0b  ---  .    .    .    F1a' B1a' ---  F1b' B1b' ---  B1a  ---  B1b  ---
    """  # noqa: E501 - the picture
    fills, steady, limits = [], [], []
    numbers = range(num_microbatches)
    for rank in range(num_ranks):
        first, second = rank, num_ranks + rank
        forwards = [Action(Op.F, second, 0, k) for k in numbers] + [Action(Op.F, first, 1, k) for k in numbers]
        backwards = [Action(Op.B, second, 0, k) for k in numbers] + [Action(Op.B, first, 0, k) for k in numbers]
        ahead = min(num_ranks - 1 - rank, 2 * num_microbatches)
        fills.append(tuple(Action(Op.F, first, 0, k) for k in numbers))
        steady.append(append_reduce(one_f_one_b_order(forwards, backwards, ahead=ahead), [first, second]))
        limits.append(num_microbatches + min(ahead + 1, 2 * num_microbatches))
    return round_robin_schedule(
        "wpipe",
        num_ranks=num_ranks,
        virtual_stages=2,
        num_microbatches=num_microbatches,
        delay=(1,) * num_ranks + (0,) * num_ranks,
        steady=steady,
        in_flight=limits,
        fill=fills,
    )


SCHEDULE = ScheduleKind("wpipe", wpipe, (2, 2), has_delay=True, synchronous="interleaved_1f1b")
