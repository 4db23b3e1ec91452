"""One rank of four is killed, stopped or breaks: all end within the time set, and the first cause is the last word."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaasync.checkpoint.paths import checkpoints_in
from megaasync.plan.text import size_text
from tests.support.cli import environment, metrics, pretrain, summary
from tests.support.long_runs import ranks_of, wait_for_step
from tests.support.restarts import RECIPE, assert_same_end
from tests.support.tiers import slow_params

STEPS = ["train.steps=12", "run.dir=run", "parallel.timeout_seconds=5"]


def run_faulty(kind, *arguments, cwd, rank=3):
    """A run of four ranks in which one meets a fault; (status, out, err, seconds)."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.faulty", kind, str(rank), *RECIPE, *STEPS, *arguments],
        cwd=cwd,
        env=environment(FAULT_DONE=str(cwd / "happened")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=100)
    finally:
        deadline = time.monotonic() + 5  # the fork server ends when it sees that the launcher has
        while (left := processes_of(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            os.killpg(process.pid, signal.SIGKILL)
    assert not left, "processes of the run outlive it"
    return process.returncode, out, err, time.monotonic() - began


def processes_of(group):
    """Ids of living processes in a process group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("whole")
    ran = pretrain(*RECIPE, *STEPS, cwd=cwd)
    assert ran.status == 0, ran.err
    return cwd / "run"


FAULTS = [
    ("forward", "ZeroDivisionError: deliberate, in forward (rank 3 was at 1F3.0 of schedule 2bw)"),
    ("backward", "ZeroDivisionError: deliberate, in backward (rank 3 was at 1B3.0 of schedule 2bw)"),
    ("step", "ZeroDivisionError: deliberate, in step (rank 3 was at"),
    ("copy", "ZeroDivisionError: deliberate, in copy"),
    ("writer", "ZeroDivisionError: deliberate, in writer"),
    ("kill", "rank 3 (stage 1, data 1) died without a word (exit code -9)"),
    ("stop", " from rank 3 (stage 1), and nothing came for 5 s: it hangs"),
]


@pytest.mark.parametrize(
    ("kind", "cause"), slow_params(FAULTS, kept=(2, 6), area="survive"), ids=lambda v: v.split()[0]
)
def test_a_fault_in_one_rank_ends_all_and_is_the_last_word(tmp_path, kind, cause):
    status, _, err, seconds = run_faulty(kind, cwd=tmp_path)
    assert (tmp_path / "happened").exists()
    assert status == 1 and cause in err.strip().splitlines()[-1], err
    assert seconds < 60
    assert summary(tmp_path / "run")["status"] == "failed"
    lasts = err[err.index("last action of each rank:") :]
    for rank, place in enumerate(("stage 0, data 0", "stage 0, data 1", "stage 1, data 0", "stage 1, data 1")):
        assert f"  rank {rank} ({place}): " in lasts
    if kind in ("forward", "kill", "stop"):
        assert "rank 3 (stage 1, data 1): forward of step 4 on stage 1, microbatch 0, begun " in lasts


@pytest.mark.parametrize("kind", slow_params(["step", "kill", "stop"], kept=(1,), area="survive"))
def test_a_run_is_begun_again_from_its_last_checkpoint(tmp_path, whole, kind):
    """Bit for bit; the fault is at the fourth batch and checkpoints are made every two."""
    status, _, err, _ = run_faulty(
        kind, "run.max_restarts=2", "checkpoint.interval=2", "checkpoint.async_save=false", cwd=tmp_path
    )
    assert status == 0, err
    assert "restart 1 of 2, from " in err and "restart 2" not in err and "last action of each rank:" in err
    starts = [row["step"] for row in metrics(tmp_path / "run", "start")]
    # the update of the fourth batch comes after the checkpoint at 4, its forward before
    assert starts == [0, 4 if kind == "step" else 2], "the checkpoint before the fault was not used"
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.parametrize("policy", slow_params(["stop", "skip"], kept=(0,), area="survive"))
def test_a_nan_on_one_data_rank_of_the_last_stage(tmp_path, policy):
    """All ranks stop in that step, nothing poisoned is saved, and no restart tries it again; or it is left out."""
    status, _, err, seconds = run_faulty(
        "nan",
        f"train.on_nonfinite={policy}",
        "checkpoint.interval=1",
        "checkpoint.keep=20",
        "run.max_restarts=3",
        cwd=tmp_path,
    )
    folder = tmp_path / "run"
    assert seconds < 60
    if policy == "skip":
        assert status == 0, err
        assert [row.get("skipped", 0) for row in metrics(folder)] == [0] * 3 + [1] * 9
        ran = pretrain(*RECIPE, *STEPS, f"train.on_nonfinite={policy}", "train.steps=14", cwd=tmp_path)
        assert ran.status == 0, ran.err  # with a row whose loss is no number in its past
        return
    assert status == 1 and "step 4: " in err.strip().splitlines()[-1] and "restart" not in err, err
    assert [row["step"] for row in metrics(folder)][-1] <= 4
    saved = checkpoints_in(folder / "checkpoints")
    assert [item.step for item in saved] == [1, 2, 3] and all(item.is_complete for item in saved)


def test_a_full_device_ends_all_with_one_message(tmp_path):
    """Not a hang, no traceback, and no restart, since that would end in the same place."""
    status, _, err, seconds = run_faulty("memory", "run.max_restarts=2", cwd=tmp_path)
    last = err.strip().splitlines()[-1]
    assert status == 1 and seconds < 60 and "Traceback" not in err and "restart" not in err, err
    assert "rank 3 (stage 1): CUDA out of memory. Tried to allocate 2.00 GiB, rank 3 was at 1F3.0 of schedule" in last
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    counted = f"; the plan counts {size_text(plan['ranks'][1]['total_bytes'])} for it, without "
    assert counted in last and "Set train.recompute=selective" in last
    assert summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow("survive")
def test_a_run_that_was_told_to_end_is_not_begun_again(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "megaasync.pretrain", *RECIPE, "train.steps=100000", *STEPS[1:], "run.max_restarts=2",
         "checkpoint.interval=1000"],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_step(tmp_path / "run", 3, process)
        os.kill(ranks_of(process)[-1], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (1, 130) and "restart" not in err, err
        assert len(metrics(tmp_path / "run", "start")) == 1
    finally:
        if processes_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow("survive")
def test_torchrun_restarts_go_on_from_the_last_checkpoint(tmp_path, whole):
    """torch's elastic agent starts all ranks again; the same command then finds the checkpoint."""
    arguments = [*RECIPE, *STEPS, "checkpoint.interval=2", "checkpoint.async_save=false"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=1",
         "-m", "tests.support.faulty", "kill", "3", *arguments],
        cwd=tmp_path, env=environment(FAULT_DONE=str(tmp_path / "happened")), capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run", "start")] == [0, 2]
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.slow("survive")
def test_a_single_rank_that_hangs_is_ended_by_the_launcher(tmp_path):
    """Nobody waits for its messages, so the launcher looks at what it begins."""
    arguments = [*RECIPE, "parallel.pipeline=1", "parallel.data=1", "train.steps=100000", *STEPS[1:]]
    arguments.append("checkpoint.interval=1000")
    process = subprocess.Popen(
        [sys.executable, "-m", "megaasync.pretrain", *arguments],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_step(tmp_path / "run", 3, process)
        began = time.monotonic()
        os.kill(ranks_of(process)[-1], signal.SIGSTOP)
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - began < 55
        assert process.returncode == 1
        assert err.strip().splitlines()[-1].startswith("error: rank 0 (stage 0) hangs: it has begun nothing for 5 s"), (
            err
        )
    finally:
        if processes_of(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
