"""Table in, table out."""

from dataclasses import replace

from megaasync.schedules.action import Action, Op
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError


def with_tied_embeddings(schedule: PipelineSchedule) -> PipelineSchedule:
    """The first and the last stage hand in the embedding's gradient, to be summed, right before their NORM.

    Raises:
        ScheduleError: the stages are clipped by themselves, so that none waits for another.
    """
    if schedule.num_stages == 1:
        return schedule
    if schedule.clip == "stage":
        raise ScheduleError(
            f"{schedule.name} cannot tie the embeddings: their gradients come from the first and the last stage, whose "
            "updates are steps apart, and waiting for both would stop the pipeline",
            remedy="model.tie_embeddings=false",
        )
    ends = (0, schedule.num_stages - 1)
    steady = []
    for actions in schedule.steady:
        order = []
        for action in actions:
            if action.op is Op.NORM and action.stage in ends:
                order.append(Action(Op.TIE, action.stage, action.step))
            order.append(action)
        steady.append(tuple(order))
    return replace(schedule, steady=tuple(steady))
