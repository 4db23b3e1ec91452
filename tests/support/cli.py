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


_WARM = WarmCommand()


@dataclass
class Ran:
    status: int
    out: str
    err: str
    seconds: float

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


def pretrain(*arguments: str, cwd: Path, timeout: float = 120, python: tuple[str, ...] = (), **env: str) -> Ran:
    """The command to its end: warm, unless it is to start in another Python or environment."""
    start = perf_counter()
    if not python and not env:
        status, out, err = _WARM(list(arguments), cwd=cwd, environment=environment(), timeout=timeout)
        return Ran(status, out, err, perf_counter() - start)
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
    called = [str(REPOSITORY / "tools" / name)] if name.endswith(".py") else ["-m", name]
    return subprocess.run(
        [sys.executable, *called, *arguments],
        cwd=cwd,
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def metrics(folder: Path, kind: str = "train") -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())
