"""The command line as a user runs it: a subprocess in a folder of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import pytest

from tests.support.warm import WarmCommand

REPOSITORY = Path(__file__).parents[2]

# A run of about a second after its import of torch.
TINY = [
    "data=synthetic",
    "data.num_tokens=20000",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.vocab_size=64",
    "model.seq_length=16",
    "model.moe.ffn_hidden_size=16",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.eval_sequences=8",
    "train.warmup_steps=0",
    "checkpoint.interval=null",  # a run without checkpoints starts a second sooner; tests that need them say so
    "device=cpu",
]


_WARM = WarmCommand(with_torch=True)
_LIGHT = WarmCommand(with_torch=False)
_READ_BY_PYTHON = ("PYTHON", "OMP_", "LD_", "LC_", "LANG")  # variables that matter before a command's first line


@dataclass
class Ran:
    status: int
    out: str
    err: str
    seconds: float
    loaded: frozenset[str] = frozenset()  # packages, if it was started warm

    @property
    def message(self) -> str:
        """The last line on the screen."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own, as `16k` or `8m`; the test is skipped where nothing may be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **extra}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megaasync.pretrain", *arguments]


def refused(*arguments: str, cwd: Path, timeout: float = 120) -> Ran:
    """The command with what it should refuse before it imports torch, which the process it comes from has not."""
    start = perf_counter()
    run = _LIGHT("megaasync.pretrain", list(arguments), cwd=cwd, environment=environment(), timeout=timeout)
    return Ran(run.status, run.out, run.err, perf_counter() - start, run.loaded)


def pretrain(*arguments: str, cwd: Path, timeout: float = 120, python: tuple[str, ...] = (), **env: str) -> Ran:
    """The command to its end: warm, unless its Python is to start in another way."""
    start = perf_counter()
    if not python and not any(name.startswith(_READ_BY_PYTHON) for name in env):
        run = _WARM("megaasync.pretrain", list(arguments), cwd=cwd, environment=environment(**env), timeout=timeout)
        return Ran(run.status, run.out, run.err, perf_counter() - start, run.loaded)
    done = subprocess.run(
        [sys.executable, *python, "-m", "megaasync.pretrain", *arguments],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    return Ran(done.returncode, done.stdout, done.stderr, perf_counter() - start)


def tool(name: str, *arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess:
    """A tool by the path of its script, or by its module."""
    program = str(REPOSITORY / "tools" / name) if name.endswith(".py") else name
    run = _WARM(program, list(arguments), cwd=cwd, environment=environment(), timeout=timeout)
    return subprocess.CompletedProcess([program, *arguments], run.status, run.out, run.err)


def metrics(folder: Path, kind: str = "train") -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())
