"""One rank's life: join the group, build, train, write."""

import json
import signal
import socket
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

from megaasync.checkpoint.paths import read_meta
from megaasync.checkpoint.rollback import rollback_to
from megaasync.checkpoint.run_lock import join_folder
from megaasync.cluster.record import LAUNCH_RECORD
from megaasync.config.schema import Config, ConfigError, DockerCluster, SlurmCluster
from megaasync.data.identity import samples_of
from megaasync.data.prepare import PreparedData
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.gpu_environment import GpuNeeds
from megaasync.distributed.groups import choose_device, join_group, leave_group
from megaasync.distributed.interrupts import noted_by
from megaasync.pipeline import TrainingError
from megaasync.train.build import CheckpointFiles, build_trainer
from megaasync.train.checkpointing import sound_checkpoint
from megaasync.train.determinism import repeat_exactly
from megaasync.train.memory import explained_memory
from megaasync.train.output import RunOutput
from megaasync.train.preflight import preflight
from megaasync.train.rank_job import RankJob
from megaasync.train.trainer import Trainer


def _stop_on_signals(trainer: Trainer) -> None:
    """SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 ask for an end that all ranks agree on; after the last two a job goes on."""
    requeueing = (signal.SIGUSR1, signal.SIGUSR2)
    former = [
        *(signal.signal(number, lambda *_: trainer.request_stop()) for number in (signal.SIGINT, signal.SIGTERM)),
        *(signal.signal(number, lambda *_: trainer.request_stop(requeue=True)) for number in requeueing),
    ]
    for number in noted_by(former):  # came before, and its exception was lost
        trainer.request_stop(requeue=number in requeueing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGUSR2})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _as_rank_0_says(said: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized():
        return said
    box = [said]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _check_same_tokens(prepared: PreparedData, environment: RankEnvironment) -> None:
    """All ranks read the same tokens: a node may hold an older copy under the same name.

    Raises:
        ConfigError: on every rank, names the first one that differs from rank 0.
    """
    if environment.world_size == 1 or prepared.train is None:
        return
    mine = (socket.gethostname(), samples_of(prepared.train), samples_of(prepared.validation))
    found: list[Any] = [None] * environment.world_size
    dist.all_gather_object(found, mine)
    for rank, (host, *samples) in enumerate(found):
        if samples != list(found[0][1:]):
            raise ConfigError(
                f"data: the token files {prepared.train} that rank {rank} on {host} reads are not those of rank 0 on "
                f"{found[0][0]}; copy the same files to all nodes, or use a folder that they share"
            )


def _is_own_choice(resume: Path, folder: Path, config: Config) -> bool:
    """Whether the run itself chose among its own checkpoints, so that it may choose another."""
    requested = config.checkpoint.resume
    is_named = requested not in ("auto", "never") and Path(requested).expanduser().resolve() == resume.resolve()
    return not is_named and resume.resolve().parent == (folder / "checkpoints").resolve()


def _launch_record(folder: Path) -> dict[str, Any]:
    """What `megaasync.launch` wrote into the run folder; nothing if it was not launched by it."""
    try:
        return json.loads((folder / LAUNCH_RECORD).read_text())
    except (OSError, ValueError):
        return {}


def run_rank(
    environment: RankEnvironment,
    job: RankJob,
) -> str:
    """Train on this rank, from joining the group to leaving it.

    Args:
        environment: this rank's place.
        job: what to train; rank 0's folder and checkpoint are those of all ranks.

    Returns:
        completed or interrupted.
    """
    config = job.config
    # a node that has lost its GPUs must not quietly go on without
    on_cluster = isinstance(config.cluster, SlurmCluster | DockerCluster)
    wants_gpu = on_cluster and config.cluster.gpus_per_node and config.device == "auto"
    # a GPU bound to each task is the only one that it sees
    is_bound = bool(getattr(config.cluster, "gpus_per_task", None))
    device = choose_device(
        "cuda" if wants_gpu else config.device,
        local_rank=0 if is_bound else environment.local_rank,
        local_world_size=1 if is_bound else environment.local_world_size,
        needs=GpuNeeds(config.parallel.pipeline, config.parallel.p2p_channels, config.train.deterministic),
        notify=_say if environment.rank == 0 else lambda line: None,
    )
    if config.train.deterministic:
        repeat_exactly()
    join_group(environment, device=device, timeout=timedelta(seconds=config.parallel.timeout_seconds))
    folder, resume, identity = _as_rank_0_says((job.folder, job.resume, job.prepared.identity))
    prepared = replace(job.prepared, identity=identity)
    with suppress(OSError):  # a folder that only rank 0 sees cannot be guarded from here
        join_folder(folder)
    _check_same_tokens(prepared, environment)
    if resume is not None:
        resume = sound_checkpoint(
            resume,
            folder,
            falls_back=_is_own_choice(resume, folder, config),
            rank=environment.rank,
            world_size=environment.world_size,
            notify=_say,
        )
    if environment.rank == 0:  # nothing of the run was touched before it was clear what it goes on from
        rollback_to(folder, 0 if resume is None else read_meta(resume)["step"])
    output = RunOutput(config, folder, data=prepared.identity, began=job.began) if environment.rank == 0 else None
    notify = output.notify if output is not None else lambda line: None
    files = CheckpointFiles(folder / "checkpoints", resume, notify)
    if isinstance(config.cluster, SlurmCluster) and config.cluster.preflight and environment.world_size > 1:
        launched = _as_rank_0_says(_launch_record(folder))
        for line in preflight(environment, config, folder, device, launched=launched):
            notify(line)
    with output or nullcontext(), explained_memory(config, rank=environment.rank):
        trainer = build_trainer(
            config,
            environment=environment,
            prepared=prepared,
            device=device,
            observer=output,
            files=files,
            began=job.began,
        )
        _stop_on_signals(trainer)
        if output is not None:
            output.begin(
                has_validation=trainer.has_validation,
                step=trainer.start,
                checkpoint=resume,
                kernels=trainer.kernels,
            )
        outcome = trainer.train()
        if output is not None:
            output.finish(outcome)
    # srun ends the other tasks when one has ended with a status: rank 0 writes for all first
    problem = _as_rank_0_says(outcome.save_problem)
    leave_group()
    if problem is not None:
        on_disk = "there is none" if outcome.saved_step is None else f"the newest one is of step {outcome.saved_step}"
        raise TrainingError(f"the last checkpoint, of step {outcome.steps}, could not be saved: {problem}; {on_disk}")
    return outcome.status
