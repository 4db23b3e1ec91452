"""Signals and deaths: what ends a run from the command line, and what it leaves behind."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.cli import metrics, summary
from tests.support.long_runs import ranks_of, start_long_run, wait_for_step
from tests.support.tiers import slow_params


@pytest.mark.parametrize(
    ("number", "to"),
    slow_params(
        [
            (number, to)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            for to in ("launcher", "group", "rank")
        ],
        kept=(1, 5),
        area="survive",
    ),
    ids=str,
)
def test_a_signal_ends_all_ranks_with_the_folder_whole(tmp_path, long_run, number, to):
    """To the launcher; to all, as a terminal, `timeout` or scancel do; to one rank (which heeds SIGTERM only)."""
    if to == "rank" and number is not signal.SIGTERM:
        return
    process = long_run
    wait_for_step(tmp_path / "run", 5, process)
    start = time.monotonic()
    if to == "rank":
        os.kill(ranks_of(process)[-1], number)
    else:
        (os.killpg if to == "group" else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 25  # by itself: force is used after 28
    assert process.returncode == 130, err
    assert err.strip().splitlines() == [f"interrupted; the run folder is {tmp_path / 'run'}"]
    result = summary(tmp_path / "run")
    rows = metrics(tmp_path / "run")
    assert result["status"] == "interrupted"
    assert result["steps"] == rows[-1]["step"] == len(rows)
    assert (tmp_path / "run" / "report.html").exists()
    assert ranks_of(process) == []


def wait_until_heeded(process: subprocess.Popen, number: signal.Signals) -> None:
    """Until the launcher catches the signal: before its first line there is nothing to leave behind."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (number - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError(f"the launcher never caught {number.name}")


@pytest.mark.parametrize(
    ("number", "delay"),
    slow_params(
        [(number, delay) for number in (signal.SIGINT, signal.SIGTERM) for delay in (0.0, 0.2, 0.8, 2.3)],
        kept=(2, 7),
        area="survive",
    ),
    ids=str,
)
def test_a_signal_during_start_up_leaves_nothing(tmp_path, long_run, delay, number):
    process = long_run
    wait_until_heeded(process, signal.SIGTERM)  # main's first line; Python itself catches SIGINT from its start
    time.sleep(delay)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1].startswith("interrupted")
    assert "Traceback" not in err
    left = {path.name for path in (tmp_path / "run").glob("*")} if (tmp_path / "run").exists() else set()
    assert not left or "summary.json" in left
    assert ranks_of(process) == []


def test_a_signal_during_a_long_evaluation_is_heeded(tmp_path):
    process = start_long_run(tmp_path, "train.eval_interval=3", "train.eval_sequences=null", "data.num_tokens=8000000")
    try:
        wait_for_step(tmp_path / "run", 3, process)
        time.sleep(1)
        start = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - start < 25, "it was ended by force"
        assert process.returncode == 130, err
        assert summary(tmp_path / "run")["steps"] == 3
        assert metrics(tmp_path / "run", "val") == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_killed_rank_ends_the_run(tmp_path, long_run):
    process = long_run
    wait_for_step(tmp_path / "run", 5, process)
    # the fork server is the eldest, the ranks are its children
    victim = ranks_of(process)[-1]
    start = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert time.monotonic() - start < 60
    assert process.returncode == 1
    lines = err.strip().splitlines()
    assert lines[0] == "last action of each rank:" and len(lines) == 4
    assert lines[-1] == "error: rank 1 (stage 1) died without a word (exit code -9)"
    result = summary(tmp_path / "run")
    assert (result["status"], result["steps"]) == ("failed", len(metrics(tmp_path / "run")))
    assert ranks_of(process) == []


def test_ranks_die_with_their_launcher(tmp_path, long_run):
    process = long_run
    wait_for_step(tmp_path / "run", 5, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while ranks_of(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_of(process) == []
