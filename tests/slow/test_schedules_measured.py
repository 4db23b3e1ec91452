"""Slow, area engine: what the schedules give on emulated and real compute (docs/RESULTS.md has figures)."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import REPOSITORY, environment


def bench(folder: Path, *arguments: str) -> dict[str, dict[str, float]]:
    """Rows of a benchmark by schedule; its output is shown."""
    ran = subprocess.run(
        [sys.executable, "tools/bench_pipeline.py", *arguments, f"out={folder}"],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=3000,
    )
    print(ran.stdout, flush=True)
    assert ran.returncode == 0
    rows = csv.DictReader((folder / "bench.csv").open())
    return {
        row["schedule"]: {key: float(value) for key, value in row.items() if value and key not in TEXT} for row in rows
    }


TEXT = ("mode", "engine", "schedule")
LONG = ("forward_ms=40", "backward_ms=80", "steps=10")


@pytest.mark.slow("engine")
@pytest.mark.parametrize("ranks", [4, 8])
def test_2bw_is_busy_and_near_its_ideal(tmp_path, ranks):
    schedules = "schedules=Schedule1F1B,1f1b,2bw"
    plain = bench(tmp_path / "a", f"ranks={ranks}", "microbatches_per_rank=1", schedules, *LONG)
    ideal = (2 * ranks - 1) / ranks
    hops = bench(
        tmp_path / "b",
        f"ranks={ranks}",
        "microbatches_per_rank=2",
        "extra_in_flight=1",
        "hop=0.3",
        "schedules=Schedule1F1B,1f1b,2bw",
        *LONG,
    )
    for rows, name, wanted in ((plain, "2bw", ideal), (hops, "2bw (e = 1)", (3 * ranks - 1) / (2 * ranks))):
        ours = rows["1f1b" if name == "2bw" else "1f1b (e = 1)"]
        assert rows[name]["bubble"] <= 0.03
        assert rows[name]["over_torch_1f1b"] >= 0.95 * wanted
        assert ours["seconds_per_step"] / rows[name]["seconds_per_step"] >= 0.95 * wanted


@pytest.mark.slow("engine")
@pytest.mark.parametrize("ranks", [4, 8])
def test_reduction_and_step_are_hidden(tmp_path, ranks):
    """Together they cost two microbatches (6 forwards), m = 2P."""
    size = (f"ranks={ranks}", "microbatches_per_rank=2", *LONG)
    free = bench(tmp_path / "a", *size, "schedules=1f1b,2bw")
    costly = bench(tmp_path / "b", *size, "schedules=1f1b,2bw", "reduce=3", "step=3")
    shown = bench(tmp_path / "c", *size, "schedules=2bw", "reduce=3", "step=3", "overlap_step=false")

    def exposed(rows, name, base):
        return rows[name]["seconds_per_step"] - free[base]["seconds_per_step"]

    cost = 6 * 0.040
    assert exposed(costly, "2bw", "2bw") <= 0.02 * costly["2bw"]["seconds_per_step"]
    assert exposed(costly, "1f1b", "1f1b") >= 0.95 * cost
    assert exposed(shown, "2bw (exposed step)", "2bw") == pytest.approx(cost, rel=0.1)


@pytest.mark.slow("engine")
def test_the_simulator_predicts_every_schedules_bubble(tmp_path):
    size = ("ranks=4", "microbatches_per_rank=2", "forward_ms=60", "backward_ms=120", "steps=8", "rounds=1")
    names = "gpipe,1f1b,interleaved_1f1b,zb_h1,zbv,2bw,interleaved_2bw,wpipe"
    for extra in ((), ("step=1", "reduce=1"), ("hop=0.2",)):
        for name, row in bench(tmp_path / "-".join(("a", *extra)), *size, f"schedules={names}", *extra).items():
            assert row["bubble"] == pytest.approx(row["bubble_planned"], abs=0.03), (name, extra)


@pytest.mark.slow("engine")
def test_real_compute_on_two_ranks(tmp_path):
    """m = 2 and m = 8; medians of 9 alternated rounds."""
    names = "Schedule1F1B,ScheduleInterleaved1F1B,ScheduleInterleavedZeroBubble,1f1b,interleaved_1f1b,zb_h1,zbv,2bw"
    for per_rank, ideal in ((1, 1.5), (4, 1.125)):
        rows = bench(
            tmp_path / str(per_rank),
            "mode=real",
            "ranks=2",
            f"microbatches_per_rank={per_rank}",
            "rounds=9",
            "steps=10",
            f"schedules={names}",
        )
        assert rows["1f1b"]["over_torch_1f1b"] >= 0.97
        assert rows["2bw"]["over_torch_1f1b"] >= 0.87 * ideal
