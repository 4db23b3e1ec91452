"""What the launcher says in environment variables; the one place that reads them. Imports no torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from megaasync.config import ConfigError


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """One rank's place, as torchrun or srun give it.

    Attributes:
        rank, world_size: in the whole job.
        local_rank, local_world_size: on this host.
        init_method: how to meet the others, for torch.distributed.
        board: file of the launcher's `ActionBoard`, if it has one.
        restart: how often the launcher has started the ranks again.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    board: Path | None = None
    restart: int = 0


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(
            f"{name}={text}: this environment variable must be a whole number; start with torchrun, or bare"
        )
    return int(text)


def launched_environment() -> RankEnvironment | None:
    """The place that torchrun or srun gave this process, or None if it was started bare.

    Raises:
        ConfigError: launched with several ranks but without an address to meet at.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env and "MASTER_ADDR" in env:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    else:
        return None
    rank, world_size = _number(names[0], env[names[0]]), _number(names[1], env[names[1]])
    local_rank = _number(names[2], env.get(names[2], str(rank)))
    local_world = _number(names[3], env.get(names[3], str(world_size)))
    if world_size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise ConfigError(
            f"WORLD_SIZE={world_size}: MASTER_ADDR and MASTER_PORT are not set; start with torchrun, or bare"
        )
    restart = _number("TORCHELASTIC_RESTART_COUNT", env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return RankEnvironment(rank, world_size, local_rank, local_world, "env://", restart=restart)


def prepare_cuda() -> None:
    """Before CUDA starts: as many hardware queues as there are streams, which communicate side by side.

    With fewer, a collective in the background and one of the layers could stand in one queue, in another order on
    another rank, and wait for each other.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
