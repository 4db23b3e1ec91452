"""An interrupt ends a command with status 130, wherever in the command it comes."""

import os
import subprocess
import sys
import time

from tests.support.cli import REPOSITORY

_APP = """
import os, signal
from megaasync.entry.hydra_app import run_app

def task(config):
    exec("os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**8): pass", globals())

run_app(task)
"""


def test_an_interrupt_inside_an_exec_keeps_the_status(tmp_path):
    """As when it falls into the making of a dataclass, at import: Python would end itself by the signal after all."""
    (tmp_path / "app.py").write_text(_APP)
    ended = subprocess.run([sys.executable, "-m", "app"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines()[-1] == "interrupted"


_SPAWN = """
import multiprocessing.context, os, signal, time
from megaasync.entry.spawn import Interrupted, spawn_ranks

start = multiprocessing.context.ForkServerProcess.start

def start_and_interrupt(process):
    start(process)
    os.kill(os.getpid(), signal.SIGINT)

def rank(environment):
    time.sleep(100)

if __name__ == "__main__":
    multiprocessing.context.ForkServerProcess.start = start_and_interrupt
    try:
        spawn_ranks(rank, (), world_size=2)
    except Interrupted:
        print("interrupted", flush=True)
"""


def test_an_interrupt_right_after_a_rank_has_started_ends_it(tmp_path):
    """A rank that the launcher did not know of yet would be waited for at the launcher's exit."""
    (tmp_path / "app.py").write_text(_SPAWN)
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                           env={**os.environ, "PYTHONPATH": str(REPOSITORY)})  # fmt: skip
    assert ended.stdout == "interrupted\n", ended.stderr
    assert time.monotonic() - began < 40
