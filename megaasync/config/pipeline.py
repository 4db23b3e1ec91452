"""The pipeline that a config asks for: phases and stages, from the schedules' tables."""

from megaasync.config.schema import Config
from megaasync.schedules import Phase, make_phases


def phases_of(config: Config) -> tuple[Phase, ...]:
    """The phases of a run.

    Raises:
        ScheduleError: the schedule is not defined for these sizes.
    """
    schedule, parallel = config.schedule, config.parallel
    return make_phases(
        schedule.name,
        num_steps=config.train.steps,
        sync_start_steps=schedule.sync_start_steps,
        sync_cooldown_steps=schedule.sync_cooldown_steps,
        num_ranks=parallel.pipeline,
        num_microbatches=config.num_microbatches,
        virtual_stages=parallel.virtual_stages,
        extra_in_flight=schedule.extra_in_flight,
        tied=config.model.tie_embeddings,
        delay=schedule.delay,
    )
