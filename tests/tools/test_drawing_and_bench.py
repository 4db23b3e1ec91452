"""The tools as a user runs them: pictures that are there, figures in files, and one message for a mistake."""

import csv
import xml.etree.ElementTree as ET

import pytest

from megaasync.observe.trace import merge, read_chrome_trace, write_chrome_trace
from megaasync.schedules import Costs, build_schedule, simulate
from tests.support.cli import TINY, pretrain, tool


def test_a_plan_as_text_svg_and_png(tmp_path):
    for name in ("a.svg", "a.png"):
        ran = tool("draw_schedule.py", "schedule=zb_h1", "stages=4", "microbatches=8", f"out={name}", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert "rank 3 |" in ran.stdout
        assert "bubble            11.1%" in ran.stdout  # 3/27 (docs/method.md)
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_a_runs_trace_is_drawn(tmp_path):
    ran = pretrain(*TINY, "parallel.pipeline=2", "train.steps=8", "logging.trace=true", "run.dir=run", cwd=tmp_path)
    assert ran.status == 0, ran.err
    ran = tool("draw_schedule.py", "trace=run", "steps=3-5", "out=m.svg", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    titles = [e.text for e in ET.parse(tmp_path / "m.svg").getroot().iter() if e.tag.endswith("title")]
    for step in (2, 3, 4):
        assert any(title.startswith(f"0F{step}.") for title in titles)
    assert tool("draw_schedule.py", "trace=run", "steps=70-75", cwd=tmp_path).returncode == 2


def test_a_trace_is_read_back(tmp_path):
    spans = simulate(build_schedule("2bw", num_ranks=2, num_microbatches=3), num_steps=4, costs=Costs(step=1))
    timeline = merge([([s for s in spans if s.rank == rank], []) for rank in (0, 1)])
    write_chrome_trace(timeline, tmp_path / "trace.json")
    again = read_chrome_trace(tmp_path / "trace.json")
    assert again.num_ranks == 2
    assert [(s.rank, s.action, s.beside) for s in again.spans] == [(s.rank, s.action, s.beside) for s in timeline.spans]


@pytest.mark.slow("engine")
def test_a_small_bench_writes_table_csv_and_picture(tmp_path):
    """Emulated compute of both engines; figures only as far as noise cannot reach."""
    ran = tool(
        "bench_pipeline.py",
        "ranks=2",
        "microbatches_per_rank=1",
        "schedules=Schedule1F1B,1f1b,2bw",
        "rounds=1",
        "steps=6",
        "forward_ms=15",
        "backward_ms=30",
        "out=b",
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    rows = {row["schedule"]: row for row in csv.DictReader((tmp_path / "b" / "bench.csv").open())}
    assert set(rows) == {"Schedule1F1B", "1f1b", "2bw"}
    assert float(rows["2bw"]["planned_over_1f1b"]) == 1.5
    assert float(rows["2bw"]["over_torch_1f1b"]) > 1.25
    assert float(rows["1f1b"]["bubble"]) > float(rows["2bw"]["bubble"]) + 0.15
    assert (tmp_path / "b" / "bench.png").read_bytes().startswith(b"\x89PNG")
