"""An interrupt ends a command with status 130, wherever in the command it comes."""

import subprocess
import sys

_APP = """
import os, signal
from megaasync.entry.hydra_app import run_app

def task(config):
    exec("os.kill(os.getpid(), signal.SIGINT)\\nwhile True: pass", globals())

run_app(task)
"""


def test_an_interrupt_inside_an_exec_keeps_the_status(tmp_path):
    """As when it falls into the making of a dataclass, at import: Python would end itself by the signal after all."""
    (tmp_path / "app.py").write_text(_APP)
    ended = subprocess.run([sys.executable, "-m", "app"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines()[-1] == "error: interrupted"
