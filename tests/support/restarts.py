"""Runs that are killed and go on, and what they must end in."""

import contextlib
import os
import shutil
import signal
import subprocess

import pytest
import torch

from megaasync.checkpoint import dcp_io
from megaasync.checkpoint.chunks import TensorChunks
from megaasync.checkpoint.paths import checkpoints_in
from tests.support.cli import TINY, command, environment, metrics, pretrain, summary
from tests.support.runs import CLOCKS

RECIPE = [
    *TINY,
    "data.num_tokens=4000",  # 31 steps' worth
    "parallel.pipeline=2",
    "parallel.data=2",
    "optimizer=muon",
    "schedule=2bw",
    "correction=error_feedback",
    "model.num_layers=2",
    "train.lr_schedule=constant",
    "checkpoint.interval=4",
    "logging.interval=1000",
]


def start(cwd, *arguments):
    return subprocess.Popen(
        command(*RECIPE, *arguments),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def started():
    """Start runs; whatever is left of them is ended after the test."""
    processes = []

    def begin(cwd, *arguments):
        processes.append(start(cwd, *arguments))
        return processes[-1]

    yield begin
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def numbers(folder):
    """What training wrote, without clocks."""
    rows = metrics(folder)
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows]


def tensors_of(checkpoint):
    """Every tensor of a checkpoint, whole."""
    found = {}
    entries = {}
    metadata = dcp_io.dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for name, shape in dcp_io.tensors_in(checkpoint).items():
        dtype = metadata[name].properties.dtype
        found[name] = torch.zeros(shape, dtype=dtype)
        entries[name] = TensorChunks(shape, dtype, {(0,) * len(shape): found[name]})
    dcp_io.load(entries, checkpoint, group=None)
    return found


def assert_same_end(folder, other):
    assert numbers(folder) == numbers(other)
    last, expected = (checkpoints_in(item / "checkpoints")[-1] for item in (folder, other))
    assert last.step == expected.step
    mine, theirs = tensors_of(last.path), tensors_of(expected.path)
    assert mine.keys() == theirs.keys() and len(mine) > 20
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    assert summary(folder)["val_loss"] == summary(other)["val_loss"]


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("eight")
    ran = pretrain(*RECIPE, "train.steps=8", "run.dir=run", cwd=cwd)
    assert ran.status == 0, ran.err
    return cwd / "run"


@pytest.fixture
def with_two(tmp_path, eight_steps):
    """The checkpoints, at 4 and 8, of a run of 8 steps."""
    shutil.copytree(eight_steps, tmp_path / "run")
    return tmp_path / "run" / "checkpoints"
