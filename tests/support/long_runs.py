"""Runs that go on until something ends them."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.cli import TINY, command, environment, metrics


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError("the run never came to its steps")


@pytest.fixture
def long_run(tmp_path):
    """A run that would take hours, on the test's folder; whatever is left of it is ended after the test."""
    process = start_long_run(tmp_path)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start_long_run(cwd: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(*TINY, "parallel.pipeline=2", "train.steps=100000", "run.dir=run", *arguments),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The fork server and the ranks of a run, eldest first: the processes of its session that the server made."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) == process.pid and b"forkserver" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)
