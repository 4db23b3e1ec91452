"""ZB-H1: weight gradients fill part of the bubble (arXiv 2401.10241)."""

from megaasync.schedules.action import Action, Op
from megaasync.schedules.kind import ScheduleKind
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


SCHEDULE = ScheduleKind("zb_h1", zb_h1)
