"""Saving beside the training: the pipeline waits for a copy, not for the disk; old ones go when new ones are whole."""

import json
import os
import time
from datetime import timedelta

import pytest
import torch

from megaasync.checkpoint import dcp_io, paths
from megaasync.checkpoint.chunks import TensorChunks
from megaasync.checkpoint.dcp_io import load
from megaasync.checkpoint.writer import AsyncCheckpointWriter
from megaasync.data.prepare import PreparedData
from megaasync.distributed.groups import join_group, leave_group
from megaasync.entry.spawn import spawn_ranks
from megaasync.train.build import CheckpointFiles, build_trainer
from tests.support.configs import small_config

DELAY = 3.0


class Clock:
    """Times at which rows came."""

    def __init__(self):
        self.steps = {}

    def on_row(self, row):
        if row["kind"] == "train":
            self.steps[row["step"]] = time.monotonic()


def timed_rank(environment, config, root, delay):
    """(seconds of each call of save, when the first write ended, times of rows)."""
    join_group(environment, device=torch.device("cpu"), timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    clock, ended, calls = Clock(), [], []
    write = dcp_io.write

    def slow_write(*args, **kwargs):
        write(*args, **kwargs)
        time.sleep(delay)
        ended.append(time.monotonic())

    dcp_io.write = slow_write
    trainer = build_trainer(
        config,
        environment=environment,
        prepared=PreparedData(None, None, None),
        device=torch.device("cpu"),
        observer=clock,
        files=CheckpointFiles(root, None, lambda line: None),
    )
    save = trainer._checkpoints.save

    def timed_save(*args, **kwargs):
        start = time.monotonic()
        save(*args, **kwargs)
        calls.append(time.monotonic() - start)

    trainer._checkpoints.save = timed_save
    trainer.train()
    dcp_io.write = write
    leave_group()
    return calls, ended, clock.steps


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.slow("survive"))])
def test_a_slow_disk_does_not_stop_the_pipeline(tmp_path, is_async):
    """With a writer that takes three seconds more, steps go on meanwhile; without async_save they wait for it."""
    config = small_config(
        "muon",
        parallel__pipeline=2,
        train__steps=9,
        train__micro_batch_size=1,
        train__global_batch_size=2,
        checkpoint__interval=4,
        checkpoint__async_save=is_async,
    )
    (calls, ended, steps), _ = spawn_ranks(timed_rank, (config, tmp_path, DELAY), world_size=2)
    assert len(calls) == 3  # at 4, 8 and the end; each waits for the one before
    before_the_first_was_written = [step for step, at in steps.items() if step > 4 and at < ended[0]]
    if is_async:
        assert calls[0] < 0.5 * DELAY
        assert before_the_first_was_written[:2] == [5, 6]
    else:
        assert calls[0] > DELAY and not before_the_first_was_written
    assert [found.step for found in paths.checkpoints_in(tmp_path) if found.is_complete] == [8, 9]


def entries(value=1.0):
    return {"w": TensorChunks((3,), torch.float32, {(0,): torch.full((3,), value)})}


def keep(root, steps, number=2):
    said = []
    one = AsyncCheckpointWriter(root, keep=number, is_async=True, group=None, notify=said.append)
    for step in steps:
        one.save(step, entries(), {"step": step}, own={})
    one.wait()
    return said


def test_what_is_copied_may_change_at_once(tmp_path):
    one = AsyncCheckpointWriter(tmp_path, keep=2, is_async=True, group=None, notify=print)
    mine = entries(5.0)
    one.save(3, mine, {"step": 3}, own={})
    mine["w"].chunks[(0,)].zero_()
    one.wait()
    read = entries(0.0)
    load(read, tmp_path / "step_00000003", group=None)
    assert read["w"].chunks[(0,)].tolist() == [5.0] * 3


def test_the_newest_are_kept_and_strangers_too(tmp_path):
    (tmp_path / "step_00000001").mkdir()  # not complete: not ours to delete
    (tmp_path / "notes").mkdir()
    assert keep(tmp_path, [2, 3, 4, 10]) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes",
        "step_00000001",
        "step_00000004",
        "step_00000010",
    ]
    assert paths.latest(tmp_path).step == 10


def test_a_failed_save_keeps_the_old_ones(tmp_path, monkeypatch):
    keep(tmp_path, [1, 2])

    def broken(*args, **kwargs):
        raise OSError(28, "No space left on device", "shard")

    monkeypatch.setattr(dcp_io, "write", broken)
    (said,) = keep(tmp_path, [3])
    assert said.startswith("checkpoint at step 3 failed: shard: No space left on device; training goes on, the newest")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("moment", ["rename", "mark"])
def test_a_death_while_one_of_the_same_step_is_replaced_loses_none(tmp_path, monkeypatch, moment):
    keep(tmp_path, [7])

    class Killed(BaseException):
        pass

    def die(*args, **kwargs):
        raise Killed

    if moment == "mark":
        monkeypatch.setattr(paths, "write_json", die)
    else:
        monkeypatch.setattr(type(tmp_path), "rename", lambda path, to: die() if ".writing" in path.name else
                            os.rename(path, to))  # fmt: skip
    tmp_dir = paths.tmp_dir_of(tmp_path, 7)
    tmp_dir.mkdir()
    (tmp_dir / "new").write_text("new")
    with pytest.raises(Killed):
        paths.finish(tmp_dir, tmp_path / "step_00000007", {"new": 0})
    monkeypatch.undo()
    assert paths.latest(tmp_path) is None
    paths.remove_leftovers(tmp_path)
    assert paths.latest(tmp_path).step == 7
    assert json.loads((tmp_path / "step_00000007" / paths.META).read_text())["step"] == 7
