"""Before the first step of a cluster's job: do all nodes have the same code, config, room, devices and network.

Seconds here save hours: a bad node is named before anything is computed on it.
"""

import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from megaasync.checkpoint.paths import checkpoints_in
from megaasync.cluster.record import code_hash
from megaasync.config.identity import config_hash
from megaasync.config.schema import Config, ConfigError
from megaasync.distributed.environment import RankEnvironment

_CLOCK_SECONDS = 5.0  # apart from the middle one; more makes file times and time limits lie
_CACHE_BYTES = 64 * 2**20
_MESSAGE_BYTES = 8 * 2**20
_ROUNDS = 3
_SLOW = 3  # times slower than the middle node is told of
_STATE_BYTES = 20  # of a parameter in a checkpoint: z, x, a pending gradient, two moments, in float32


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one rank finds on its node.

    Attributes:
        rank: of the whole job.
        host: of the node.
        code, config: hashes.
        clock: `time.time` at about the same moment on all ranks.
        run_free, cache_free: bytes free in the run folder and in the data cache; None where there is none of them.
        devices: GPUs that torch sees.
        pair, ring, all_to_all: bytes per second that this rank sent, see `_bandwidths`.
    """

    rank: int
    host: str
    code: str
    config: str
    clock: float
    run_free: int | None
    cache_free: int | None
    devices: int
    pair: float
    ring: float
    all_to_all: float


@dataclass(frozen=True, slots=True)
class Requirements:
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


def mismatched_hosts(facts: Sequence[NodeReport], name: str, expected: str | None) -> list[str]:
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


def problems(facts: Sequence[NodeReport], needs: Requirements) -> list[str]:
    """What is wrong, a line each, with the node's name and the remedy; empty if nothing is."""
    found = mismatched_hosts(facts, "code", needs.code) + mismatched_hosts(facts, "config", needs.config)
    seen, now = set(), statistics.median(fact.clock for fact in facts)
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
        if abs(fact.clock - now) > _CLOCK_SECONDS:
            found.append(
                f"{fact.host}: its clock is {fact.clock - now:+.0f} s from the middle one; synchronise it (chrony, ntp)"
            )
    return found


def describe(facts: Sequence[NodeReport]) -> list[str]:
    """A line per node with its bandwidths, slow nodes marked."""
    hosts: dict[str, list[NodeReport]] = {}
    for fact in facts:
        hosts.setdefault(fact.host, []).append(fact)
    slowest = {host: min(mine, key=lambda fact: fact.pair) for host, mine in hosts.items()}
    middle = statistics.median(fact.pair for fact in slowest.values())
    now = statistics.median(fact.clock for fact in facts)
    return [
        f"preflight  {host}: {len(mine)} rank(s), GB/s per rank: neighbour {slowest[host].pair / 1e9:.3g}, ring "
        f"{min(fact.ring for fact in mine) / 1e9:.3g}, all-to-all {min(fact.all_to_all for fact in mine) / 1e9:.3g}; "
        f"clock {mine[0].clock - now:+.1f} s"
        + ("   <- WARNING: much slower than the others" if slowest[host].pair * _SLOW < middle else "")
        for host, mine in hosts.items()
    ]


def _bandwidths(device: torch.device, environment: RankEnvironment) -> tuple[float, float, float]:
    """Bytes per second that this rank sends: to a neighbour node, in a ring and in an all-to-all of all ranks.

    In the last two everybody waits for the slowest. To tell which node that is, ranks also exchange in pairs, first
    with the node after and then with the one before or the other way round, and the better one counts: a good node has
    a good neighbour on one side, a bad node has none.
    """
    rank, size = environment.rank, environment.world_size
    out = torch.zeros(max(_MESSAGE_BYTES // size, 1) * size, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)

    def exchange(to: int, source: int) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]):
            work.wait()

    def seconds(act: Callable[[], None] | None) -> float:
        """Seconds of one exchange that all ranks begin together; ranks without a partner only begin."""
        found = []
        for _ in range(1 + _ROUNDS):  # the first one makes the connections
            dist.all_reduce(torch.zeros(1, device=device))
            start = time.perf_counter()
            if act is not None:
                act()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])

    span = environment.local_world_size if size > environment.local_world_size else 1
    is_even = rank // span % 2 == 0
    pairs = []
    for after in (is_even, not is_even):
        peer = rank + span if after else rank - span
        if 0 <= peer < size:
            pairs.append(seconds(partial(exchange, peer, peer)))
        else:
            seconds(None)
    ring = seconds(partial(exchange, (rank + 1) % size, (rank - 1) % size))
    all_to_all = seconds(lambda: dist.all_to_all_single(into, out))
    return tuple(out.numel() / seconds for seconds in (min(pairs, default=ring), ring, all_to_all))


def _free(path: Path | None) -> int | None:
    """Bytes free in the file system of a path that need not be there yet."""
    if path is None:
        return None
    above = next(folder for folder in (path, *path.parents) if folder.exists())
    return shutil.disk_usage(above).free


def preflight(
    environment: RankEnvironment,
    config: Config,
    folder: Path,
    device: torch.device,
    *,
    launched: Mapping[str, Any],
) -> list[str]:
    """Look at all nodes; every rank of a group of several calls it.

    Args:
        environment: this rank's place.
        config: validated.
        folder: the run folder.
        device: of this rank.
        launched: environment.json of the run folder, or nothing.

    Returns:
        Lines for the user.

    Raises:
        ConfigError: on every rank, with all that is wrong.
    """
    cache = getattr(config.data, "cache_dir", None)
    pair, ring, all_to_all = _bandwidths(device, environment)
    dist.all_reduce(torch.zeros(1, device=device))  # all ranks are here: their clocks can be compared
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clock = time.time()
    mine = NodeReport(
        environment.rank,
        socket.gethostname(),
        code_hash(Path(__file__).parents[1]),
        config_hash(config),
        clock,
        _free(folder),
        _free(None if cache is None else Path(cache).expanduser()),
        torch.cuda.device_count(),
        pair,
        ring,
        all_to_all,
    )
    found: list[Any] = [None] * environment.world_size
    dist.all_gather_object(
        found, (mine, sum(checkpoint.is_complete for checkpoint in checkpoints_in(folder / "checkpoints")))
    )
    # what is there is what rank 0 sees: all ranks must come to the same judgement, whatever their file caches hold
    facts, kept = [fact for fact, _ in found], found[0][1]
    new = max(config.checkpoint.keep + 1 - kept, 1) if config.checkpoint.interval is not None else 0
    parameters = launched.get("total_parameters", 0)
    is_new = not kept  # a run that goes on may do so with mended code; then only the nodes must agree
    needs = Requirements(
        launched.get("code_hash") if is_new else None,
        launched.get("config_hash") if is_new else None,
        run_bytes=new * parameters * _STATE_BYTES,
        devices=None
        if config.device == "cpu"
        else getattr(config.cluster, "gpus_per_task", None) or config.cluster.gpus_per_node,
    )
    if wrong := problems(facts, needs):
        raise ConfigError("preflight: " + "; ".join(wrong))
    changed = [
        name for name in ("code", "config") if launched.get(f"{name}_hash", getattr(mine, name)) != getattr(mine, name)
    ]
    note = [f"preflight  the {' and the '.join(changed)} changed since the launch"] if changed else []
    return describe(facts) + note
