"""Rules of the schedule and the correction."""

from megaasync.config.pipeline import phases_of
from megaasync.config.schema import Config, ConfigError
from megaasync.schedules import SCHEDULES, ScheduleError


def check_schedule(config: Config) -> None:
    """The schedule is defined for these sizes, and a correction has a delay to correct."""
    schedule = config.schedule
    try:
        phases_of(config)
    except ScheduleError as error:
        raise ConfigError(f"schedule={schedule.name}: {error}{_schedule_remedy(config, error)}") from None
    if config.correction.name != "none" and not SCHEDULES[schedule.name].has_delay:
        raise ConfigError(
            f"correction={config.correction.name}: corrects a gradient delay, but schedule={schedule.name} has none; "
            "set correction=none or schedule=2bw"
        )


def check_tied_checkpoints(config: Config) -> None:
    """The state can be named: a tied embedding must be the same on both of its stages."""
    delays = {delay for phase in phases_of(config) for delay in (phase.schedule.delay,) if len(set(delay)) > 1}
    if config.checkpoint.interval is not None and config.model.tie_embeddings and delays:
        raise ConfigError(
            f"checkpoint.interval={config.checkpoint.interval}: under schedule={config.schedule.name} the copies of a "
            "tied embedding are of different versions; set checkpoint.interval=null or model.tie_embeddings=false"
        )


def _schedule_remedy(config: Config, error: ScheduleError) -> str:
    """Which key to change, as far as the error says what is wrong."""
    if error.remedy:
        return f"; set {error.remedy}"
    if error.wanted_microbatches is None:
        return ""
    train, wanted = config.train, error.wanted_microbatches
    here = (
        f"; here m = {config.num_microbatches} = train.global_batch_size={train.global_batch_size} / "
        f"(train.micro_batch_size={train.micro_batch_size} x data x expert = {config.data_ranks}); set "
    )
    if wanted < config.num_microbatches:
        return f"{here}train.micro_batch_size={train.global_batch_size // (config.data_ranks * wanted)}"
    size = wanted * train.micro_batch_size * config.data_ranks
    return f"{here}train.global_batch_size={size}, a smaller train.micro_batch_size, or fewer stages"
