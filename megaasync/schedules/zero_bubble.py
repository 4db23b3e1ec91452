"""Synchronous schedules that split the backward into input (I) and weight (W) gradients (arXiv 2401.10241).

Weight gradients have no receiver, so they fill what would be bubble.
"""

from megaasync.schedules.action import Action, Op
from megaasync.schedules.list_scheduling import Priority, list_schedule
from megaasync.schedules.orders import append_reduce, round_robin_schedule
from megaasync.schedules.schedule import PipelineSchedule


def zb_h1(
    *, num_ranks: int, num_microbatches: int, virtual_stages: int = 1, extra_in_flight: int = 0
) -> PipelineSchedule:
    """ZB-H1: the order of 1F1B, W of stage s lagging s microbatches behind I; P activations on every stage.

    For m >= P and I >= W the bubble is (P-1)(F+I-W) / (m(F+I+W) + (P-1)(F+I-W)).

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(zb_h1(num_ranks=3, num_microbatches=3), num_steps=1))
        rank 0 |F0a F0b F0c .   .   I0a W0a I0b W0b I0c W0c
        rank 1 |.   F0a F0b .   I0a F0c I0b W0a I0c W0b W0c
        rank 2 |.   .   F0a I0a F0b I0b F0c I0c W0a W0b W0c
    """
    steady = []
    for rank in range(num_ranks):
        ahead = min(num_ranks - 1 - rank, num_microbatches)
        forwards, inputs, weights = (
            [Action(op, rank, 0, k) for k in range(num_microbatches)] for op in (Op.F, Op.I, Op.W)
        )
        order = forwards[:ahead]
        for k, action in enumerate(inputs):
            order += forwards[ahead + k : ahead + k + 1]
            order.append(action)
            order += weights[k - rank : k - rank + 1] if k >= rank else []
        order += weights[max(num_microbatches - rank, 0) :]
        steady.append(append_reduce(order, [rank]))
    return round_robin_schedule(
        "zb_h1",
        num_ranks=num_ranks,
        virtual_stages=1,
        num_microbatches=num_microbatches,
        delay=(0,) * num_ranks,
        steady=steady,
        in_flight=(min(num_ranks, num_microbatches),) * num_ranks,
    )


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
