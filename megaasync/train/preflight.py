"""Before the first step of a cluster's job: do all nodes have the same code, config, room, devices and network.

Seconds here save hours: a bad node is named before anything is computed on it.
"""

import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from megaasync.cluster.record import code_hash, config_hash
from megaasync.config.schema import ConfigError, TrainConfig
from megaasync.distributed.environment import RankEnvironment

_CLOCK_SECONDS = 5.0  # apart from rank 0's; more makes file times and time limits lie
_CACHE_BYTES = 64 * 2**20
_MESSAGE_BYTES = 8 * 2**20
_ROUNDS = 3
_SLOW = 3  # times slower than the middle node is told of
_STATE_BYTES = 20  # of a parameter in a checkpoint: z, x, a pending gradient, two moments, in float32


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank finds on its node.

    Attributes:
        rank: of the whole job.
        host: of the node.
        code, config: hashes.
        clock: `time.time` at about the same moment on all ranks.
        run_free, cache_free: bytes free in the run folder and in the data cache; None where there is none of them.
        devices: GPUs that torch sees.
        ring, all_to_all: bytes per second that this rank sent.
    """

    rank: int
    host: str
    code: str
    config: str
    clock: float
    run_free: int | None
    cache_free: int | None
    devices: int
    ring: float
    all_to_all: float


@dataclass(frozen=True, slots=True)
class Needs:
    """What every node should have.

    Attributes:
        code, config: hashes at the launch; None if that is not known.
        run_bytes: free in the run folder.
        devices: GPUs on each node; None if the run needs none.
    """

    code: str | None
    config: str | None
    run_bytes: int
    devices: int | None


def _odd_ones(facts: Sequence[Facts], name: str, expected: str | None) -> list[str]:
    """Problems of hosts whose hash is not the expected one, or not that of most ranks."""
    usual = expected or Counter(getattr(fact, name) for fact in facts).most_common(1)[0][0]
    odd = sorted({fact.host for fact in facts if getattr(fact, name) != usual})
    if not odd:
        return []
    found = next(getattr(fact, name) for fact in facts if getattr(fact, name) != usual)
    whose = "the launch's" if expected else "the other nodes'"
    remedy = {
        "code": "install the same commit everywhere, or run from a folder that all nodes share",
        "config": "launch again with python -m megaasync.launch, or restore hydra_configs",
    }[name]
    return [f"{', '.join(odd)}: {name} hash {found}, not {whose} {usual}; {remedy}"]


def problems(facts: Sequence[Facts], needs: Needs) -> list[str]:
    """What is wrong, a line each, with the node's name and the remedy; empty if nothing is."""
    found = _odd_ones(facts, "code", needs.code) + _odd_ones(facts, "config", needs.config)
    seen = set()
    for fact in facts:
        if fact.host in seen:
            continue
        seen.add(fact.host)
        if needs.devices is not None and fact.devices < needs.devices:
            found.append(
                f"{fact.host}: torch sees {fact.devices} of {needs.devices} GPUs (cluster.gpus_per_node); look at the "
                f"driver and at nvidia-smi there, or leave the node out with cluster.exclude={fact.host}"
            )
        if fact.run_free is not None and fact.run_free < needs.run_bytes:
            found.append(
                f"{fact.host}: {fact.run_free / 2**30:.2f} GiB free in the run folder, checkpoints need "
                f"{needs.run_bytes / 2**30:.2f}; make room, or set run.dir or a smaller checkpoint.keep"
            )
        if fact.cache_free is not None and fact.cache_free < _CACHE_BYTES:
            found.append(
                f"{fact.host}: {fact.cache_free / 2**20:.0f} MiB free in data.cache_dir; make room, or set another"
            )
        if abs(fact.clock - facts[0].clock) > _CLOCK_SECONDS:
            found.append(
                f"{fact.host}: its clock is {fact.clock - facts[0].clock:+.0f} s from that of {facts[0].host}; "
                "synchronise it (chrony, ntp)"
            )
    return found


def describe(facts: Sequence[Facts]) -> list[str]:
    """A line per node with its bandwidths, slow nodes marked."""
    hosts: dict[str, list[Facts]] = {}
    for fact in facts:
        hosts.setdefault(fact.host, []).append(fact)
    ring = {host: min(fact.ring for fact in mine) for host, mine in hosts.items()}
    exchange = {host: min(fact.all_to_all for fact in mine) for host, mine in hosts.items()}
    middle = statistics.median(ring.values()), statistics.median(exchange.values())
    lines = []
    for host, mine in hosts.items():
        is_slow = ring[host] * _SLOW < middle[0] or exchange[host] * _SLOW < middle[1]
        lines.append(
            f"preflight  {host}: {len(mine)} rank(s), ring {ring[host] / 1e9:.3g} GB/s, all-to-all "
            f"{exchange[host] / 1e9:.3g} GB/s per rank, clock {mine[0].clock - facts[0].clock:+.1f} s"
            + ("   <- WARNING: much slower than the others" if is_slow else "")
        )
    return lines


def _bandwidths(device: torch.device) -> tuple[float, float]:
    """Bytes per second sent by this rank in a ring and in an all-to-all of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(max(_MESSAGE_BYTES // size, 1) * size, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)

    def ring() -> None:
        sends = [dist.P2POp(dist.isend, out, (rank + 1) % size), dist.P2POp(dist.irecv, into, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    def all_to_all() -> None:
        dist.all_to_all_single(into, out)

    found = []
    for exchange in (ring, all_to_all):
        exchange()  # makes the connections
        start = time.perf_counter()
        for _ in range(_ROUNDS):
            exchange()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(_ROUNDS * out.numel() / (time.perf_counter() - start))
    return found[0], found[1]


def _free(path: Path | None) -> int | None:
    """Bytes free in the file system of a path that need not be there yet."""
    if path is None:
        return None
    above = next(one for one in (path, *path.parents) if one.exists())
    return shutil.disk_usage(above).free


def preflight(
    environment: RankEnvironment,
    config: TrainConfig,
    plain: Mapping[str, Any],
    folder: Path,
    device: torch.device,
    *,
    launched: Mapping[str, Any],
) -> list[str]:
    """Look at all nodes; every rank of a group of several calls it.

    Args:
        environment: this rank's place.
        config, plain: read, and as a plain dict.
        folder: the run folder.
        device: of this rank.
        launched: environment.json of the run folder, or nothing.

    Returns:
        Lines for the user.

    Raises:
        ConfigError: on every rank, with all that is wrong.
    """
    cache = getattr(config.data, "cache_dir", None)
    ring, all_to_all = _bandwidths(device)
    dist.all_reduce(torch.zeros(1, device=device))  # all ranks are here: their clocks can be compared
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mine = Facts(
        environment.rank,
        socket.gethostname(),
        code_hash(Path(__file__).parents[1]),
        config_hash(plain),
        time.time(),
        _free(folder),
        _free(None if cache is None else Path(cache).expanduser()),
        torch.cuda.device_count(),
        ring,
        all_to_all,
    )
    facts: list[Any] = [None] * environment.world_size
    dist.all_gather_object(facts, mine)
    kept = len(list(folder.glob("checkpoints/step_*")))
    new = max(config.checkpoint.keep + 1 - kept, 1) if config.checkpoint.interval is not None else 0
    parameters = launched.get("total_parameters", 0)
    needs = Needs(
        launched.get("code_hash"),
        launched.get("config_hash"),
        run_bytes=new * parameters * _STATE_BYTES,
        devices=config.cluster.gpus_per_node if config.device != "cpu" else None,
    )
    if wrong := problems(facts, needs):
        raise ConfigError("preflight: " + "; ".join(wrong))
    return describe(facts)
