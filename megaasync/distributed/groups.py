"""The process group and the device of one rank."""

import ipaddress
import socket
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlsplit

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from megaasync.config import ConfigError
from megaasync.distributed import DeviceError, TransportError
from megaasync.distributed.environment import RankEnvironment, cpu_count, prepare_gloo, variables
from megaasync.distributed.gpu_environment import GpuNeeds, own_gpu, prepare_gpu

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)  # containers and imports take different times on different hosts


def _say_nothing(line: str) -> None:
    pass


def choose_device(
    name: str,
    *,
    local_rank: int,
    local_world_size: int = 1,
    needs: GpuNeeds = GpuNeeds(),  # noqa: B008 - frozen
    notify: Callable[[str], None] = _say_nothing,
) -> torch.device:
    """The device that `device=` means on this rank; where it is a GPU, the environment is prepared for it.

    Args:
        name: cpu, cuda or auto.
        local_rank: this rank's number on its host.
        local_world_size: ranks of its host.
        needs: what the environment follows.
        notify: told what was changed of it.

    Raises:
        DeviceError: cuda was asked for and is not there, or the rank has no GPU of its own; names the host.
        ConfigError: the environment would hang the run.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device=cuda: torch sees no CUDA device on {socket.gethostname()}; look at its driver, or set device=cpu"
        )
    for line in prepare_gpu(variables(), needs, has_started=torch.cuda.is_initialized()):
        notify(line)
    try:
        number = own_gpu(
            variables(),
            local_rank=local_rank,
            local_world_size=local_world_size,
            num_visible=torch.cuda.device_count(),
        )
    except ConfigError as error:
        raise DeviceError(f"device={name}: {socket.gethostname()}, {error}") from None
    return torch.device("cuda", number)


def _meeting_store(environment: RankEnvironment, *, timeout: timedelta) -> dist.Store:
    """The store in which ranks find each other."""
    place = urlsplit(environment.init_method)
    if place.scheme != "tcp":
        met = rendezvous(environment.init_method, environment.rank, environment.world_size, timeout=timeout)
        return next(met)[0]
    is_server = environment.rank == 0
    listener = _listen(place.hostname, place.port, environment) if is_server else None
    return dist.TCPStore(
        place.hostname,
        place.port,
        environment.world_size,
        is_server,
        timeout,
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )


def _listen(host: str, port: int, environment: RankEnvironment) -> socket.socket:
    """A listening socket on the one address that the others come to; torch's own would listen on all of them.

    Raises:
        OSError: the port is taken, or the name is unknown.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # many hosts know themselves by a loopback address only: then the others come by another
    is_unknown = ipaddress.ip_address(address[0]).is_loopback and environment.world_size > environment.local_world_size
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port) if is_unknown else address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port}: {error.strerror}") from None
    return listener


def _claim_gpu(store: dist.Store, uuid: str, *, rank: int) -> None:
    """No two ranks have one GPU: NCCL would say so in its own words, or hang.

    Raises:
        DeviceError: another rank has it.
    """
    if store.add(f"gpu {uuid}", 1) > 1:
        raise DeviceError(
            f"rank {rank} of {socket.gethostname()} has the GPU of another rank ({uuid}); start at most one rank per "
            "GPU, and look at CUDA_VISIBLE_DEVICES and at the binding of GPUs to tasks"
        )


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
    timeout = max(timeout, RENDEZVOUS_TIMEOUT)
    if device.type == "cpu":
        prepare_gloo()
    try:
        store = _meeting_store(environment, timeout=timeout)
        # torchrun keeps its store when it starts ranks again, with the addresses of those that are gone in it
        store = dist.PrefixStore(f"restart {environment.restart}", store)
        if device.type == "cuda":
            _claim_gpu(store, str(torch.cuda.get_device_properties(device).uuid), rank=environment.rank)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timeout,
        )
    except (RuntimeError, OSError) as error:
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
