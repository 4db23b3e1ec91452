"""ZBV: two chunks per rank in a V, weight gradients in the bubble (arXiv 2401.10241)."""

from megaasync.schedules.action import Action, Op
from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.list_scheduling import Priority, list_schedule
from megaasync.schedules.orders import append_reduce
from megaasync.schedules.schedule import PipelineSchedule


def zbv(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 2, extra_in_flight: int = 0
) -> PipelineSchedule:
    """ZBV: two chunks per rank in a V, so that the first and the last stage are on rank 0; 2P half activations.

    The order is the better of two greedy ones. With F = I = W the bubble comes within a few units of
    (P-1)/(6m+P-1): what is left is the flush that the exact global norm asks for.

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(zbv(num_ranks=2, num_microbatches=2), num_steps=1))
        rank 0 |F0a  F0b  .    F0a' I0a' F0b' I0b' I0a  W0a' I0b  W0a  W0b' W0b
        rank 1 |.    F0a  F0a' F0b  F0b' I0a' I0a  I0b' I0b  W0a' W0a  W0b' W0b
    """
    num_stages = 2 * num_ranks
    rank_of_stage = tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))

    def microbatch(action: Action) -> int:
        assert action.microbatch is not None, f"{action} is of no microbatch"
        return action.microbatch

    def late(action: Action) -> bool:
        return action.stage >= num_ranks

    def gradients_first(action: Action) -> tuple[int, ...]:
        return {Op.I: 0, Op.F: 1, Op.W: 2}[action.op], -action.stage, microbatch(action)

    def depth_first(action: Action) -> tuple[int, ...]:
        if action.op is Op.W:
            return 4, microbatch(action), -action.stage
        first = {(Op.F, True): 0, (Op.I, True): 1, (Op.I, False): 2, (Op.F, False): 3}[action.op, late(action)]
        return first, microbatch(action), -action.stage

    def order(priority: Priority):  # noqa: ANN202 - as list_schedule
        return list_schedule(
            rank_of_stage, num_microbatches=num_microbatches, in_flight=2 * num_ranks, priority=priority
        )

    best = min((order(depth_first), order(gradients_first)), key=lambda orders: orders.makespan)
    return PipelineSchedule(
        name="zbv",
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of_stage=rank_of_stage,
        delay=(0,) * num_stages,
        fill=((),) * num_ranks,
        steady=tuple(
            append_reduce(actions, [rank, num_stages - 1 - rank]) for rank, actions in enumerate(best.of_rank)
        ),
        in_flight=(2 * num_ranks,) * num_ranks,
    )


SCHEDULE = ScheduleKind("zbv", zbv, (2, 2))
