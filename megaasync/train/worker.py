"""One rank's life: join the group, build, train, write."""

import signal
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from megaasync.config.schema import TrainConfig
from megaasync.data.prepare import PreparedData
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import choose_device, join_group, leave_group
from megaasync.train.build import build_trainer
from megaasync.train.output import RunOutput
from megaasync.train.trainer import Trainer


def _stop_on_signals(trainer: Trainer) -> None:
    """SIGINT and SIGTERM ask for an end that all ranks agree on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: trainer.request_stop())


def run_rank(
    environment: RankEnvironment,
    config: TrainConfig,
    prepared: PreparedData,
    folder: Path | None,
    run_config: Mapping[str, Any],
) -> str:
    """Train on this rank, from joining the group to leaving it.

    Args:
        environment: this rank's place.
        config: validated.
        prepared: where the tokens are.
        folder: the run folder, on rank 0, which writes it.
        run_config: the config as a plain dict, for the tracker.

    Returns:
        completed or interrupted.
    """
    device = choose_device(config.device, local_rank=environment.local_rank)
    join_group(environment, device=device, timeout=timedelta(seconds=config.parallel.timeout_seconds))
    output = RunOutput(config, folder, run_config) if environment.rank == 0 else None
    with output or nullcontext():
        trainer = build_trainer(config, environment=environment, prepared=prepared, device=device, observer=output)
        _stop_on_signals(trainer)
        if output is not None:
            output.begin(has_validation=trainer.has_validation)
        outcome = trainer.train()
        if output is not None:
            output.finish(outcome)
    leave_group()
    return outcome.status
