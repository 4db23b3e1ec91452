"""Whole runs from the command line: what they leave behind, and black-box facts about the delay."""

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from tests.support.cli import TINY, environment, metrics, pretrain, summary
from tests.support.tiers import slow_params

EXACT = ["train.dtype=float64", "train.lr_schedule=constant"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """One traced run with evaluations on two stages, looked at by several tests."""
    cwd = tmp_path_factory.mktemp("traced")
    ran = pretrain(
        *TINY,
        "parallel.pipeline=2",
        "correction=error_feedback",
        "train.steps=12",
        "train.eval_interval=5",
        "train.eval_sequences=128",
        "logging.trace=true",
        "logging.interval=5",
        "checkpoint.interval=1000",
        "run.dir=run",
        cwd=cwd,
    )
    assert ran.status == 0, ran.err
    return ran, cwd / "run"


def test_the_run_folder_is_as_promised(traced):
    _, folder = traced
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    files = {"config.yaml", "metrics.jsonl", "plan.json", "summary.json", "trace.json", "report.html"}
    assert names == {*files, "checkpoints"}
    train, val = metrics(folder), metrics(folder, "val")
    assert [row["step"] for row in train] == list(range(1, 13))
    assert [row["step"] for row in val] == [5, 10, 12]
    assert all({"loss", "loss_x"} <= row.keys() for row in val)
    assert [row["staleness"] for row in train] == [0] + [1] * 11
    assert [row["tokens"] for row in train] == [8 * 16 * k for k in range(1, 13)]
    assert all(row["tokens_per_second"] > 0 and row["grad_norm"] > 0 for row in train)
    (start,) = metrics(folder, "start")
    assert (start["step"], start["checkpoint"]) == (0, None)
    assert start["layout"]["pipeline"] == 2
    result = summary(folder)
    assert (result["status"], result["steps"], result["tokens"]) == ("completed", 12, 12 * 128)
    assert result["val_loss"] == val[-1]["loss"]
    assert result["train_loss"] == train[-1]["loss"]
    assert result["peak_memory_bytes"] > 50e6
    assert set(result) == {
        "status", "steps", "tokens", "train_loss", "val_loss", "tokens_per_second", "schedule", "correction",
        "bubble_planned", "bubble_measured", "fill_seconds", "drain_seconds", "peak_memory_bytes", "wall_seconds",
        "tflops_per_rank", "mfu", "checkpoint_step", "startup_seconds",
    }  # fmt: skip


def test_progress_lines_have_what_was_asked_for(traced):
    ran, _ = traced
    lines = [line for line in ran.out.splitlines() if line.startswith("step 10/12  loss")]
    assert len(lines) == 1
    for word in ("loss", "lr", "grad norm", "tokens/s", "staleness 1", "left"):
        assert word in lines[0]
    assert "\x1b" not in ran.out, "escape codes where there is no terminal"


def test_the_trace_holds_every_action_and_the_bubble_follows_from_it(traced):
    _, folder = traced
    events = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    count = {}
    for event in events:
        key = (event["cat"], event["tid"])
        count[key] = count.get(key, 0) + 1
        assert event["dur"] >= 0
    # threads 0 and 1 are the ranks' tables, 2 and 3 what they do in the background
    table, background = (("F", 48), ("B", 48)), (("N", 12), ("S", 12))
    expected = {(op, rank): n for op, n in table for rank in (0, 1)}
    assert count == expected | {(op, 2 + rank): n for op, n in background for rank in (0, 1)}
    for rank in range(4):  # a thread does one thing at a time
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == rank)
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(mine))
    # from the first F of step 2 to the last action of step N-1, steps from 1
    start = min(e["ts"] for e in events if e["cat"] == "F" and e["args"]["step"] == 1)
    end = max(e["ts"] + e["dur"] for e in events if e["args"]["step"] == 10)
    busy = sum(max(0, min(e["ts"] + e["dur"], end) - max(e["ts"], start)) for e in events if e["cat"] in ("F", "B"))
    assert summary(folder)["bubble_measured"] == pytest.approx(1 - busy / (2 * (end - start)), abs=1e-4)


def test_throughput_leaves_evaluations_out_and_fits_rows_and_trace(traced):
    _, folder = traced
    rows, rate = metrics(folder), summary(folder)["tokens_per_second"]
    seconds = sum(128 / row["tokens_per_second"] for row in rows[1:])
    assert rate == pytest.approx(11 * 128 / seconds, rel=1e-6)
    # the trace has its own way of leaving out pauses: last backwards of the first and last step on rank 0
    events = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    ends = {
        step: max(e["ts"] + e["dur"] for e in events if e["tid"] == 0 and e["cat"] == "B" and e["args"]["step"] == step)
        for step in (0, 11)
    }
    assert rate == pytest.approx(11 * 128 / (ends[11] - ends[0]) * 1e6, rel=0.1)


def test_the_report_stands_alone(traced):
    _, folder = traced
    page = (folder / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page and "<img" not in page and "<link" not in page
    drawings = page.split("<svg")[1:]
    assert len(drawings) == 7  # five curves, two timelines
    for drawing in drawings:
        ET.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")
    assert "planned: 2bw" in page and "measured: steps" in page


def test_the_report_of_a_run_that_goes_on_has_a_measured_timeline(tmp_path):
    """Of steps that this start has made: the middle of the whole run lies before it."""
    arguments = [*TINY, "parallel.pipeline=2", "train.lr_schedule=constant", "run.dir=run", "checkpoint.interval=50"]
    for steps, drawn in ((8, "steps 5 to 7"), (12, "steps 10 to 12")):
        ran = pretrain(*arguments, f"train.steps={steps}", cwd=tmp_path)
        assert ran.status == 0, ran.err
        assert f"measured: {drawn}" in (tmp_path / "run/report.html").read_text()


def test_the_resolved_config_runs_again_to_the_same_numbers(traced):
    import yaml

    _, folder = traced
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run"]["dir"] == str(folder)
    assert config["train"]["steps"] == 12
    assert "${" not in (folder / "config.yaml").read_text()


def sweep(cwd, *arguments):
    ran = pretrain("-m", *TINY, *EXACT, "run.dir=runs", *arguments, cwd=cwd, timeout=240)
    assert ran.status == 0, ran.err
    return [cwd / "runs" / str(number) for number in range(len(list((cwd / "runs").glob("[0-9]*"))))]


def test_black_box_delay_is_one_and_error_feedback_doubles_the_first_step(tmp_path):
    """Step 2 does not know the lr yet, step 3 does; error feedback at L stands where none stands at 2L."""
    folders = sweep(
        tmp_path,
        "parallel.pipeline=2",
        "train.steps=3",
        "optimizer.lr=0.01,0.02",
        "correction=none,error_feedback",
    )
    rows = {}
    for folder in folders:
        import yaml

        config = yaml.safe_load((folder / "config.yaml").read_text())
        rows[config["optimizer"]["lr"], config["correction"]["name"]] = [r["loss"] for r in metrics(folder)]
    none_l, none_2l, ef_l = rows[0.01, "none"], rows[0.02, "none"], rows[0.01, "error_feedback"]
    assert none_l[:2] == none_2l[:2] == ef_l[:2]
    assert abs(none_l[2] - none_2l[2]) > 1e-4
    assert ef_l[2] == pytest.approx(none_2l[2], rel=1e-12)


@pytest.mark.slow("engine")
def test_black_box_one_step_is_the_same_under_every_schedule(tmp_path):
    """With one step there is nothing to be late with: the settled validation loss is equal."""
    flushed = sweep(tmp_path / "a", "parallel.pipeline=2", "train.steps=1", "schedule=1f1b,2bw")
    feedback = sweep(tmp_path / "b", "parallel.pipeline=2", "train.steps=1", "correction=error_feedback")
    losses = [summary(folder)["val_loss"] for folder in (*flushed, *feedback)]
    assert len(losses) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)


@pytest.fixture(autouse=True)
def folders(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir(exist_ok=True)


def test_a_sweep_over_optimizers_makes_a_folder_each(tmp_path):
    cwd = tmp_path / "a"
    ran = pretrain("-m", *TINY, "optimizer=muon,adamw", "train.steps=2", "parallel.pipeline=2", cwd=cwd)
    assert ran.status == 0, ran.err
    folders = [path for path in (cwd / "runs").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert {folder.name.split("-")[3] for folder in folders} == {"muon", "adamw"}
    assert all(summary(folder)["status"] == "completed" for folder in folders)


def test_help_and_cfg_are_readable(tmp_path):
    ran = pretrain("--help", cwd=tmp_path)
    assert ran.status == 0
    for word in (
        "usage: python -m megaasync.pretrain",
        "optimizer: adamw, adan, lion, mars, muon, nadam, normuon, sgd, soap, torch",
        "schedule: 1f1b, 2bw",
        "Examples:",
    ):
        assert word in ran.out
    ran = pretrain("--cfg", "job", "optimizer=adamw", cwd=tmp_path)
    assert ran.status == 0
    assert "name: adamw" in ran.out and "global_batch_size: 16" in ran.out


def test_dry_run_prints_the_plan_and_writes_nothing_else(tmp_path):
    ran = pretrain("parallel.pipeline=2", "dry_run=true", cwd=tmp_path / "a")
    assert ran.status == 0, ran.err
    for word in ("parameters 2,248,576", "pipeline 2, data 1", "2bw", "bubble", "slack", "tokens per step"):
        assert word in ran.out
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("bare", "launched"),
    slow_params(
        [("parallel.pipeline=2", "parallel.pipeline=2"), ("parallel.data=2", "parallel.data=auto")],
        kept=(1,),
        area="survive",
    ),
)
def test_torchrun_gives_the_numbers_of_a_bare_start(tmp_path, bare, launched):
    arguments = [*TINY, *EXACT, "train.steps=4"]
    assert pretrain(*arguments, bare, "run.dir=bare", cwd=tmp_path).status == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [*torchrun, "-m", "megaasync.pretrain", *arguments, launched],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()  # decided once, not per rank
    assert "data: 2" in (folder / "config.yaml").read_text() or bare != "parallel.data=2"  # not auto
    alone, together = metrics(tmp_path / "bare"), metrics(folder)
    assert [row["loss"] for row in alone] == [row["loss"] for row in together]


@pytest.mark.slow("out")
def test_wandb_offline_logs_on_our_step_axis_and_a_broken_one_stops_nothing(tmp_path):
    arguments = [*TINY, "train.steps=3"]
    ran = pretrain(*arguments, "logging.wandb.mode=offline", "run.dir=offline", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert list((tmp_path / "offline" / "wandb").glob("offline-run-*/*.wandb"))
    start = time.monotonic()
    ran = pretrain(
        *arguments, "logging.wandb.mode=online", "run.dir=online", cwd=tmp_path,
        WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9",
    )  # fmt: skip
    assert time.monotonic() - start < 60
    assert ran.status == 0, ran.err
    assert "wandb:" in ran.out
    assert len(metrics(tmp_path / "online")) == 3
