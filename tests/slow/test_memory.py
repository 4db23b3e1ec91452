"""Slow, area survive: nothing grows over 20,000 steps: memory, file descriptors, threads, of every rank."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli import command, environment, metrics

pytestmark = pytest.mark.slow("survive")

STEPS = 20_000
RUN = [
    "model=tiny_dense", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=2",
    "model.ffn_hidden_size=64", "model.vocab_size=64", "model.seq_length=32", "train.global_batch_size=4",
    "train.micro_batch_size=2", "data=synthetic", "optimizer=adamw", "schedule=2bw", "parallel.pipeline=2",
    "device=cpu", "checkpoint.interval=null", "logging.interval=1000", f"train.steps={STEPS}", "run.dir=run",
]  # fmt: skip


def ranks_of(group):
    """Process ids of the ranks: they hold the board of actions."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = os.getpgid(int(process.name)) == group
            if is_ours and "/board" in (process / "maps").read_text():
                found.append(process)
        except OSError:
            continue
    return sorted(found, key=lambda item: int(item.name))


def look(process):
    """(resident bytes of its own, open files, threads)."""
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024, len(list((process / "fd").iterdir())), int(status["Threads"])


def test_twenty_thousand_steps_are_flat(tmp_path):
    """Below 100 bytes a step once the recorder of actions is full, and 8 MiB from step 100 to the end."""
    process = subprocess.Popen(command(*RUN), cwd=tmp_path, env=environment(), start_new_session=True)
    seen = {}
    try:
        while process.poll() is None:
            time.sleep(1.0)
            if not (tmp_path / "run/metrics.jsonl").exists() or not (rows := metrics(tmp_path / "run")):
                continue
            step = rows[-1]["step"]
            if 100 <= step < STEPS - 200:
                for rank in [item for item in ranks_of(process.pid) if (item / "fd").exists()]:
                    try:
                        seen.setdefault(rank.name, []).append((step, *look(rank)))
                    except OSError:
                        continue
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    ranks = [np.array(item) for item in seen.values() if len(item) > 20]
    assert len(ranks) == 3, "two ranks and the launcher hold the board"
    for samples in ranks:
        late = samples[samples[:, 0] > 5000]
        slope = np.polyfit(late[:, 0], late[:, 1], 1)[0]
        growth = samples[-1, 1] - samples[0, 1]
        print(f"{slope:.0f} bytes a step late, {growth / 2**20:.1f} MiB in all; {samples[-1, 2:]} files and threads")
        assert slope < 100 and growth < 8 * 2**20
        assert (samples[:, 2:] == samples[0, 2:]).all(), "open files or threads came or went"
