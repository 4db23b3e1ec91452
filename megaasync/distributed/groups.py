"""The process group and the device of one rank."""

import ipaddress
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from megaasync.distributed import DeviceError, TransportError
from megaasync.distributed.environment import RankEnvironment, cpu_count, prepare_cuda, prepare_gloo

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)  # containers and imports take different times on different hosts


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
