"""Sweeps, as Hydra's users run them: here, or in other processes by a launcher; and what the command line answers."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megaasync.config import Config
from megaasync.entry.help import render_help
from megaasync.entry.hydra_app import _count_runs, _end_sweep
from megaasync.update_rules import OPTIMIZERS
from tests.support.cli import TINY, environment, pretrain, summary
from tests.support.tiers import slow_params

SWEEP = ["-m", *TINY, "model.num_layers=1", "train.steps=2", "checkpoint.interval=null", "run.dir=sweep"]
LAUNCHERS = {
    "basic": [],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"],
}


@pytest.mark.parametrize("launcher", slow_params(["basic", "joblib", "submitit"], kept=(0,), area="cluster"))
def test_four_jobs_of_which_one_fails(tmp_path, launcher):
    """The others are done, the command fails, a line for each says what became of it; logs stay."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher") if launcher != "basic" else None
    lrs = "optimizer.lr=0.001,-1,0.002,0.003"
    ran = pretrain(*SWEEP, lrs, "parallel.pipeline=1", *LAUNCHERS[launcher], cwd=tmp_path, timeout=300)
    assert ran.status == 2, ran.out + ran.err
    assert "these runs of the sweep failed: 1 (" in ran.message and "optimizer.lr=-1" in ran.message
    for number in (0, 2, 3):
        assert summary(tmp_path / "sweep" / str(number))["status"] == "completed"
    table = [line.split() for line in ran.out.splitlines() if line.split()[1:2] in (["done"], ["failed"])]
    assert [(row[0], row[1]) for row in table] == [("0", "done"), ("1", "failed"), ("2", "done"), ("3", "done")]
    if launcher == "basic":  # it has no logs to keep
        assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"0", "2", "3"}
        return
    records = [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep/sweep").glob("[0-9].json"))]
    assert [record["status"] for record in records] == [0, 2, 0, 0]
    assert records[2]["folder"] == str(tmp_path / "sweep/2") and "optimizer.lr=0.002" in records[2]["overrides"]


@pytest.mark.slow("cluster")
def test_records_of_an_older_sweep_do_not_count(tmp_path):
    records = "hydra.sweep.dir=records"
    refused = pretrain(*SWEEP, records, "optimizer.lr=-1,-2,-3", cwd=tmp_path)
    assert refused.status == 2
    ran = pretrain(*SWEEP, records, "optimizer.lr=0.001", "--config-dir", str(tmp_path), "train.steps=1", cwd=tmp_path)
    assert ran.status == 0, ran.err


@pytest.mark.slow("cluster")
def test_ranks_of_a_job_in_another_process_start(tmp_path):
    """Two ranks each: nothing that they need lives in __main__."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    two = ["parallel.pipeline=2", "model.num_layers=2", "train.seed=1,2,3,4"]
    ran = pretrain(*SWEEP, *two, *LAUNCHERS["joblib"], cwd=tmp_path, timeout=300)
    assert ran.status == 0, ran.out + ran.err
    assert all(summary(tmp_path / "sweep" / str(n))["status"] == "completed" for n in range(4))


def test_a_run_that_ends_by_its_time_limit_does_not_end_the_sweep(tmp_path):
    ran = pretrain(*SWEEP, "train.steps=1000000", "train.time_limit=4", "train.seed=1,2", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert [summary(tmp_path / "sweep" / n)["status"] for n in "01"] == ["interrupted"] * 2
    assert ran.out.count(" stopped ") == 2 and "error" not in ran.err


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("optimizer.learning_rate=1", ["did you mean optimizer.lr"]),
        ("optimizer=adamW", ["did you mean adamw"]),
        ("cluster.mem=480G", ["cluster.mem", "of cluster=slurm", "set cluster=slurm"]),
        ("data.blend=x", ["data.blend: unknown key", "did you mean data.path"]),
        ("train.max_steps=3", ["did you mean train.steps"]),
        ("parallel.tp=2", ["did you mean parallel.tensor"]),
        ("correction.strength=1", ["of correction=taylor"]),
        ("data.shards=3", ["data.shards: unknown key", "data has", "cache_dir"]),
    ],
)
def test_suggestions_help(tmp_path, argument, words):
    ran = pretrain(argument, cwd=tmp_path)
    assert ran.status == 2 and all(word in ran.message for word in words), ran.err


def test_help_explains_every_key():
    for choices in ([], ["cluster=docker", "data=hf", "correction=taylor", "model=tiny_dense"], ["data=indexed"]):
        page = render_help(choices, name="pretrain")
        rows = [line for line in page.split("what they mean:")[1].split("Examples")[0].splitlines() if line.strip()]
        heads = [line for line in rows if line.startswith("  ") and line[2] != " "]
        assert len(heads) > 60
        silent = [line.split()[0] for line in heads if len(line.split(None, 2)) < 3 or not line[60:].strip(" .)")]
        assert silent == []
        assert max(map(len, page.splitlines())) <= 118
    for name in ("pretrain", "launch"):
        for optimizer in OPTIMIZERS:
            assert "optimizer.lr" in render_help([f"optimizer={optimizer}"], name=name)
    assert "Groups (group=choice):" in page and Config.__name__ not in page


def test_version_and_what_there_is(tmp_path):
    assert pretrain("--version", cwd=tmp_path).out.startswith("megaasync 0.")
    ran = megaasync(cwd=tmp_path)
    assert ran.returncode == 0 and "megaasync launch" in ran.stdout


def megaasync(*arguments, cwd):
    words = [sys.executable, "-m", "megaasync", *arguments]
    return subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True)


def test_one_entry_point_has_the_commands(tmp_path):
    planned = megaasync("plan", "model=tiny_dense", f"run.dir={tmp_path / 'run'}", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"plan.json"}
    assert megaasync("checkpoint", "list", ".", cwd=tmp_path).returncode == 2
    wrong = megaasync("pretrain", "model=tiny", cwd=tmp_path)
    assert wrong.returncode == 2 and "model=tiny: unknown model" in wrong.stderr
    unknown = megaasync("train", cwd=tmp_path)
    assert unknown.returncode == 2 and unknown.stderr == "error: train: no such command; megaasync --help lists them\n"


def test_ctrl_c_in_the_first_second_is_quiet(tmp_path):
    for moment in (0.1, 0.4, 0.8):
        # a job in the background of a shell ignores the signal, and what it starts does too
        words = ["env", "--default-signal=INT", sys.executable, "-m", "megaasync.pretrain", *TINY, "train.steps=100000"]
        process = subprocess.Popen(
            words, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGINT)
        try:
            err = process.communicate(timeout=60)[1]
        finally:
            process.kill()
        # an interrupt while Python itself starts is Python's to tell of
        assert "Traceback" not in err or "/megaasync/" not in err, (moment, err)
        assert process.returncode in (130, 1, -signal.SIGINT), (moment, process.returncode, err)


def test_a_run_without_a_record_has_failed(tmp_path):
    """As where a launcher's process could not load the job: all of them, or the last one."""
    words = ["-m", "optimizer.lr=0.1,0.2", "train.seed=1,2", "hydra/launcher=joblib", "run.dir=x"]
    assert _count_runs(words) == 4 and _count_runs(["train.seed=1"]) == 1
    for done in (0, 3):
        for number in range(done):
            (tmp_path / f"{number}.json").write_text(json.dumps({"number": number, "overrides": [], "status": 0}))
        with pytest.raises(SystemExit) as end:
            _end_sweep(tmp_path, expected=4, task_is_collected=False)
        assert end.value.code == 1
    (tmp_path / "3.json").write_text(json.dumps({"number": 3, "overrides": [], "status": 0}))
    _end_sweep(tmp_path, expected=4, task_is_collected=False)
