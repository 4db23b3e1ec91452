"""The 1F1B order with and without a flush: `1f1b` (arXiv 1806.03377, as in Megatron-LM) and `2bw` (arXiv 2006.09503).

Both run the same order. Stage s does P-1-s forwards ahead, then alternates forward and backward. 1f1b empties the
pipeline every step (delay 0); 2bw never does, and every stage runs one weight version behind (delay 1).
"""

from megaasync.schedules.action import Action, Op
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError


def forwards_ahead(*, num_stages: int, stage: int) -> int:
    """Forwards that a stage does before its first backward: P - 1 - s."""
    return num_stages - 1 - stage


def _stream(*, stage: int, ahead: int, num_microbatches: int, num_backwards: int) -> list[Action]:
    """Alternate forward number ahead + k with backward number k; forwards run over into the following step."""
    order = []
    for k in range(num_backwards):
        step, microbatch = divmod(ahead + k, num_microbatches)
        order.append(Action(Op.F, stage, step, microbatch))
        order.append(Action(Op.B, stage, 0, k))
    return [*order, Action(Op.NORM, stage, 0)]


def one_f_one_b(*, num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B with a flush every step; bubble (P-1)/(m+P-1).

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(one_f_one_b(num_stages=3, num_microbatches=3), num_steps=1))
        rank 0 |F0a F0b F0c .   .   .   .   B0a --- .   B0b --- .   B0c ---
        rank 1 |.   F0a F0b .   .   B0a --- F0c B0b --- .   B0c ---
        rank 2 |.   .   F0a B0a --- F0b B0b --- F0c B0c ---
    """
    steady = []
    for stage in range(num_stages):
        ahead = min(forwards_ahead(num_stages=num_stages, stage=stage), num_microbatches)
        order = [Action(Op.F, stage, 0, k) for k in range(ahead)]
        stream = _stream(stage=stage, ahead=ahead, num_microbatches=num_microbatches, num_backwards=num_microbatches)
        order += [action for action in stream if action.step == 0]
        steady.append(tuple(order))
    return PipelineSchedule(
        name="1f1b",
        num_ranks=num_stages,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(range(num_stages)),
        delay=(0,) * num_stages,
        fill=((),) * num_stages,
        steady=tuple(steady),
    )


def pipedream_2bw(*, num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B without a flush, two weight versions, constant delay 1; bubble 0 in steady state.

    Raises:
        ScheduleError: m < P - 1, for which the order deadlocks (METHOD.md section 2, depth rule).

    Example:
        >>> from megaasync.schedules import render_text
        >>> print(render_text(pipedream_2bw(num_stages=3, num_microbatches=3), num_steps=2))
        rank 0 |F0a F0b F0c .   .   .   .   B0a --- F1a B0b --- F1b B0c --- F1c B1a --- .   B1b --- .   B1c ---
        rank 1 |.   F0a F0b .   .   B0a --- F0c B0b --- F1a B0c --- F1b B1a --- F1c B1b --- .   B1c ---
        rank 2 |.   .   F0a B0a --- F0b B0b --- F0c B0c --- F1a B1a --- F1b B1b --- F1c B1c ---
    """
    if num_microbatches < num_stages - 1:
        raise ScheduleError(
            f"2bw needs at least P - 1 = {num_stages - 1} microbatches per step for {num_stages} stages, but there are "
            f"{num_microbatches}: stage 0 runs {num_stages - 1} forwards ahead, so with fewer it would need a weight "
            "version whose gradient is not finished yet, and wait for itself"
        )
    fill, steady = [], []
    for stage in range(num_stages):
        ahead = forwards_ahead(num_stages=num_stages, stage=stage)
        fill.append(tuple(Action(Op.F, stage, *divmod(k, num_microbatches)) for k in range(ahead)))
        steady.append(
            tuple(_stream(stage=stage, ahead=ahead, num_microbatches=num_microbatches, num_backwards=num_microbatches))
        )
    return PipelineSchedule(
        name="2bw",
        num_ranks=num_stages,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of_stage=tuple(range(num_stages)),
        delay=(1,) * num_stages,
        fill=tuple(fill),
        steady=tuple(steady),
    )
