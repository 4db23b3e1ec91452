"""The process group and the device of one rank."""

import socket
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from megaasync.distributed import DeviceError, TransportError
from megaasync.distributed.environment import RankEnvironment, cpu_count, prepare_cuda

_MEETING_TIMEOUT = timedelta(minutes=5)  # containers and imports take different times on different hosts


def choose_device(name: str, *, local_rank: int) -> torch.device:
    """The device that `device=` means on this rank.

    Raises:
        DeviceError: cuda was asked for and is not there; names the host.
    """
    prepare_cuda()
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device=cuda: torch sees no CUDA device on {socket.gethostname()}; look at its driver, or set device=cpu"
        )
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"device={name}: rank {local_rank} of {socket.gethostname()} has no GPU of its own (there are "
            f"{torch.cuda.device_count()}); start at most one rank per GPU, or look at the host's driver"
        )
    return torch.device("cuda", local_rank)


def join_group(environment: RankEnvironment, *, device: torch.device, timeout: timedelta) -> None:
    """Make the default process group; nothing for a single rank. One thread per rank where ranks share the cores.

    Args:
        environment: this rank's place.
        device: of this rank.
        timeout: of waits in the group; ranks that start get more.

    Raises:
        TransportError: the others did not come.
    """
    if device.type == "cpu":
        torch.set_num_threads(max(cpu_count() // environment.local_world_size, 1))
    else:
        torch.cuda.set_device(device)
    if environment.world_size == 1:
        return
    timeout = max(timeout, _MEETING_TIMEOUT)
    try:
        met = rendezvous(environment.init_method, environment.rank, environment.world_size, timeout=timeout)
        store, _, _ = next(met)
        # torchrun keeps its store when it starts ranks again, with the addresses of those that are gone in it
        store = dist.PrefixStore(f"restart {environment.restart}", store)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise TransportError(
            f"rank {environment.rank} did not meet the other {environment.world_size - 1} within "
            f"{timeout.total_seconds():g} s: {reason}; have all of them started, and does every host reach "
            "MASTER_ADDR and MASTER_PORT?"
        ) from error


def leave_group() -> None:
    """Take the process group down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
