"""What the launcher says in environment variables; the one place that reads them. Imports no torch."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from megaasync.config import ConfigError
from megaasync.distributed.slurm import expand_tasks, rendezvous_endpoint


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """One rank's place, as torchrun or srun give it.

    Attributes:
        rank, world_size: in the whole job.
        local_rank, local_world_size: on this host.
        init_method: how to meet the others, for torch.distributed.
        board: file of the launcher's `HeartbeatFile`, if it has one.
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

    Under srun the meeting place is MASTER_ADDR and MASTER_PORT if they are set, else the step's first node.

    Raises:
        ConfigError: the variables do not make sense, or there is no address to meet at.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return _of_torchrun(env)
    if (of_mpirun := _of_mpirun(env)) is not None:
        return of_mpirun
    # A shell inside a job, by srun --pty, is a step of one task too, and starts ranks of its own.
    if env.get("SLURM_STEP_NUM_TASKS", "1") != "1" or ("SLURM_STEP_NUM_TASKS" in env and "MASTER_ADDR" in env):
        return _of_srun(env)
    return None


def _of_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    rank, world_size = _number("RANK", env["RANK"]), _number("WORLD_SIZE", env["WORLD_SIZE"])
    local_rank = _number("LOCAL_RANK", env.get("LOCAL_RANK", str(rank)))
    local_world = _number("LOCAL_WORLD_SIZE", env.get("LOCAL_WORLD_SIZE", str(world_size)))
    if world_size > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise ConfigError(
            f"WORLD_SIZE={world_size}: MASTER_ADDR and MASTER_PORT are not set; start with torchrun, or bare"
        )
    restart = _number("TORCHELASTIC_RESTART_COUNT", env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return RankEnvironment(rank, world_size, local_rank, local_world, "env://", restart=restart)


# rank, world size, local rank and local size as Open MPI, MVAPICH and MPICH (Intel MPI too) give them
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _of_mpirun(env: Mapping[str, str]) -> RankEnvironment | None:
    """The place that mpirun gave; None if it did not start this process, or started it alone, or srun's say counts."""
    names = next((names for names in _MPI if names[0] in env and names[1] in env), None)
    if names is None or "SLURM_STEP_NUM_TASKS" in env:
        return None
    rank, world_size = (_number(name, env[name]) for name in names[:2])
    if world_size == 1:
        return None
    if not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise ConfigError(
            f"{names[1]}={world_size}: started by mpirun, but MASTER_ADDR and MASTER_PORT do not say where the ranks "
            "meet; export them (mpirun -x MASTER_ADDR=first-node -x MASTER_PORT=29500 ...), or use torchrun or srun"
        )
    local_rank = _number(names[2], env.get(names[2], str(rank)))
    local_world = _number(names[3], env.get(names[3], str(world_size)))
    return RankEnvironment(rank, world_size, local_rank, local_world, _address(env))


def _address(env: Mapping[str, str]) -> str:
    """tcp://MASTER_ADDR:MASTER_PORT; an IPv6 address in brackets."""
    host, port = env["MASTER_ADDR"].strip("[]"), _number("MASTER_PORT", env["MASTER_PORT"])
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _of_srun(env: Mapping[str, str]) -> RankEnvironment:
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    rank, world_size, local_rank, node = (_number(name, env.get(name, "0")) for name in names)
    tasks = expand_tasks(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world_size))
    local_world = tasks[node] if node < len(tasks) else tasks[0]
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        address = _address(env)
    else:
        host, port = rendezvous_endpoint(env)
        address = f"tcp://{host}:{port}"
    return RankEnvironment(rank, world_size, local_rank, local_world, address)


def meet_on_this_host() -> None:
    """Before a group of ranks of this host alone is made: their sockets listen on the loopback interface only."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def prepare_gloo() -> None:
    """Before a gloo group is made: no flight recorder. Nobody reads it, and what it keeps of the last 2,000 collectives
    lies between tensors that come and go, so that the heap grows by tens of MB.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")


def variables() -> MutableMapping[str, str]:
    """This process's environment, as those it starts get it."""
    return os.environ


def default_cache() -> Path:
    """Where tokenizers, token files and file hashes are kept unless data.cache_dir says otherwise."""
    return Path(os.environ.get("MEGAASYNC_CACHE") or Path(os.environ.get("HOME", "/tmp")) / ".cache/megaasync")


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
