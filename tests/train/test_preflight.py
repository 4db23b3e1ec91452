"""What the preflight finds wrong, and that it names the node."""

import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megaasync.checkpoint import paths
from megaasync.cluster.record import code_hash
from megaasync.config.identity import config_hash
from megaasync.distributed import TransportError
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group, leave_group
from megaasync.entry.spawn import RankFailed, spawn_ranks
from megaasync.train.preflight import NodeReport, Requirements, describe, preflight, problems
from tests.support.configs import small_config

GIB = 2**30
GOOD = [
    NodeReport(rank, f"n{rank // 2}", "code", "conf", 1000.0 + rank / 100, 9 * GIB, 9 * GIB, 8, 3e9, 2e9, 1e9)
    for rank in range(8)
]
NEEDS = Requirements("code", "conf", run_bytes=3 * GIB, devices=8)


def with_node_2(**changes):
    return [replace(fact, **changes) if fact.host == "n2" else fact for fact in GOOD]


def test_good_nodes_pass_and_each_is_described():
    assert problems(GOOD, NEEDS) == []
    lines = describe(GOOD)
    assert len(lines) == 4
    assert "n3: 2 rank(s), GB/s per rank: neighbour 3, ring 2, all-to-all 1; clock +0.0 s" in lines[3]
    assert not any("WARNING" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": "other"}, ["n2: config hash other, not the launch's conf", "launch again"]),
        ({"code": "other"}, ["n2: code hash other, not the launch's code", "same commit"]),
        ({"devices": 7}, ["n2: torch sees 7 of 8 GPUs", "cluster.exclude=n2"]),
        ({"run_free": GIB}, ["n2: 1.00 GiB free in the run folder, checkpoints need 3.00", "make room"]),
        ({"cache_free": 10}, ["n2: 0 MiB free in data.cache_dir"]),
        ({"clock": 1060.0}, ["n2: its clock is +60 s from the middle one", "chrony"]),
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
    lines = describe(with_node_2(pair=0.5e9))
    assert ["WARNING" in line for line in lines] == [False, False, True, False]


def test_hashes_tell_what_differs(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    before = code_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("free")
    assert code_hash(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert code_hash(tmp_path) != before
    config = small_config()
    assert config_hash(config) == config_hash(small_config(run__dir="b", debug=True))
    assert config_hash(config) != config_hash(small_config(train__steps=4))


def flying_rank(environment, config, folder, launched, odd):
    device = torch.device("cpu")
    join_group(environment, device=device, timeout=timedelta(seconds=20))
    mine = replace(config, train=replace(config.train, steps=999)) if environment.rank == odd else config
    lines = preflight(environment, mine, folder, device, launched=launched)
    leave_group()
    return lines


def test_ranks_agree_and_measure(tmp_path):
    from megaasync.train import preflight as module

    config = small_config(parallel__pipeline=3, checkpoint__interval=5)
    launched = {"code_hash": code_hash(Path(module.__file__).parents[1]), "config_hash": config_hash(config)}
    for lines in spawn_ranks(flying_rank, (config, tmp_path, launched, None), world_size=3):
        (line,) = lines
        assert line.startswith(f"preflight  {socket.gethostname()}: 3 rank(s), GB/s per rank: neighbour ")
        assert 0.001 < float(line.split("ring ")[1].split(",")[0]) < 1000
    with pytest.raises(RankFailed, match="config hash .*, not the launch's") as caught:
        spawn_ranks(flying_rank, (config, tmp_path, launched, 1), world_size=3)
    assert caught.value.is_user_error
    too_much = {**launched, "total_parameters": 10**15}
    with pytest.raises(RankFailed, match="free in the run folder, checkpoints need"):
        spawn_ranks(flying_rank, (config, tmp_path, too_much, None), world_size=3)


def test_a_wrong_clock_at_the_first_node_blames_the_first_node():
    facts = [replace(fact, clock=940.0) if fact.host == "n0" else fact for fact in GOOD]
    (found,) = problems(facts, NEEDS)
    assert found.startswith("n0: its clock is -60 s")


def stalling_rank(environment):
    """Each rank a node of its own, one with a card that stalls."""
    from megaasync.train import preflight as module

    join_group(environment, device=torch.device("cpu"), timeout=timedelta(seconds=20))
    if environment.rank == 2:
        original = module.dist.batch_isend_irecv

        def stalled(operations):
            time.sleep(0.3)
            return original(operations)

        module.dist.batch_isend_irecv = stalled
    found = module._bandwidths(torch.device("cpu"), replace(environment, local_world_size=1))
    leave_group()
    return found


def test_a_slow_node_is_told_from_its_neighbours():
    found = spawn_ranks(stalling_rank, (), world_size=5)
    facts = [
        NodeReport(rank, f"n{rank}", "c", "c", 0.0, None, None, 0, *bandwidths) for rank, bandwidths in enumerate(found)
    ]
    assert ["WARNING" in line for line in describe(facts)] == [False, False, True, False, False], facts


def test_a_changed_code_stops_a_new_run_and_is_told_of_in_one_that_goes_on(tmp_path):
    config = small_config(parallel__pipeline=2, checkpoint__interval=5)
    launched = {"code_hash": "old", "config_hash": config_hash(config)}
    with pytest.raises(RankFailed, match="code hash .*, not the launch's old"):
        spawn_ranks(flying_rank, (config, tmp_path, launched, None), world_size=2)
    (tmp_path / "checkpoints" / "step_00000005").mkdir(parents=True)
    with pytest.raises(RankFailed, match="code hash"):  # a save that did not finish is nothing to go on from
        spawn_ranks(flying_rank, (config, tmp_path, launched, None), world_size=2)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / paths.META).write_text('{"step": 5}')
    paths.finish(whole, tmp_path / "checkpoints" / "step_00000005", {paths.META: paths.checksum(whole / paths.META)})
    lines = spawn_ranks(flying_rank, (config, tmp_path, launched, None), world_size=2)[0]
    assert lines[-1] == "preflight  the code changed since the launch"


def test_a_busy_port_is_named():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        place = RankEnvironment(0, 2, 0, 2, f"tcp://127.0.0.1:{port}")
        with pytest.raises(TransportError, match=f"{port}.*(in use|MASTER_PORT)"):
            join_group(place, device=torch.device("cpu"), timeout=timedelta(seconds=5))
