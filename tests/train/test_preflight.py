"""What the preflight finds wrong, and that it names the node."""

import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megaasync.cluster.record import code_hash, config_hash
from megaasync.distributed import TransportError
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group, leave_group
from megaasync.entry.spawn import RankFailed, spawn_ranks
from megaasync.train.preflight import Facts, Needs, describe, preflight, problems
from tests.support.configs import small_config

GIB = 2**30
GOOD = [
    Facts(rank, f"n{rank // 2}", "code", "conf", 1000.0 + rank / 100, 9 * GIB, 9 * GIB, 8, 2e9, 1e9)
    for rank in range(8)
]
NEEDS = Needs("code", "conf", run_bytes=3 * GIB, devices=8)


def with_node_2(**changes):
    return [replace(fact, **changes) if fact.host == "n2" else fact for fact in GOOD]


def test_good_nodes_pass_and_each_is_described():
    assert problems(GOOD, NEEDS) == []
    lines = describe(GOOD)
    assert len(lines) == 4
    assert "n3: 2 rank(s), ring 2 GB/s, all-to-all 1 GB/s per rank, clock +0.1 s" in lines[3]
    assert not any("WARNING" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": "other"}, ["n2: config hash other, not the launch's conf", "launch again"]),
        ({"code": "other"}, ["n2: code hash other, not the launch's code", "same commit"]),
        ({"devices": 7}, ["n2: torch sees 7 of 8 GPUs", "cluster.exclude=n2"]),
        ({"run_free": GIB}, ["n2: 1.00 GiB free in the run folder, checkpoints need 3.00", "make room"]),
        ({"cache_free": 10}, ["n2: 0 MiB free in data.cache_dir"]),
        ({"clock": 1060.0}, ["n2: its clock is +60 s from that of n0", "chrony"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_a_bad_node_is_named_once(changes, words):
    (found,) = problems(with_node_2(**changes), NEEDS)
    for word in words:
        assert word in found


def test_without_a_launch_the_odd_node_is_the_one_unlike_the_others():
    (found,) = problems(with_node_2(config="other"), replace(NEEDS, config=None))
    assert found.startswith("n2: config hash other, not the other nodes' conf")


def test_a_slow_node_is_marked():
    lines = describe(with_node_2(ring=0.5e9))
    assert ["WARNING" in line for line in lines] == [False, False, True, False]


def test_hashes_tell_what_differs(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    before = code_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("free")
    assert code_hash(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert code_hash(tmp_path) != before
    plain = {"train": {"steps": 3}, "run": {"dir": "a"}, "cluster": {"name": "slurm"}, "debug": False}
    assert config_hash(plain) == config_hash({**plain, "run": {"dir": "b"}, "debug": True})
    assert config_hash(plain) != config_hash({**plain, "train": {"steps": 4}})


def flying_rank(environment, config, plain, folder, launched, odd):
    device = torch.device("cpu")
    join_group(environment, device=device, timeout=timedelta(seconds=20))
    mine = {**plain, "train": {"steps": 999}} if environment.rank == odd else plain
    lines = preflight(environment, config, mine, folder, device, launched=launched)
    leave_group()
    return lines


def test_ranks_agree_and_measure(tmp_path):
    from megaasync.train import preflight as module

    plain = {"train": {"steps": 5}}
    config = small_config(parallel__pipeline=3, checkpoint__interval=5)
    launched = {"code_hash": code_hash(Path(module.__file__).parents[1]), "config_hash": config_hash(plain)}
    for lines in spawn_ranks(flying_rank, (config, plain, tmp_path, launched, None), world_size=3):
        (line,) = lines
        assert line.startswith(f"preflight  {socket.gethostname()}: 3 rank(s), ring ")
        assert 0.001 < float(line.split("ring ")[1].split()[0]) < 1000
    with pytest.raises(RankFailed, match="config hash .*, not the launch's") as caught:
        spawn_ranks(flying_rank, (config, plain, tmp_path, launched, 1), world_size=3)
    assert caught.value.is_user_error
    too_much = {**launched, "total_parameters": 10**15}
    with pytest.raises(RankFailed, match="free in the run folder, checkpoints need"):
        spawn_ranks(flying_rank, (config, plain, tmp_path, too_much, None), world_size=3)


def test_a_busy_port_is_named():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        place = RankEnvironment(0, 2, 0, 2, f"tcp://127.0.0.1:{port}")
        with pytest.raises(TransportError, match=f"{port}.*(in use|MASTER_PORT)"):
            join_group(place, device=torch.device("cpu"), timeout=timedelta(seconds=5))
