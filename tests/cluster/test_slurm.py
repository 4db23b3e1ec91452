"""Jobs that `python -m megaasync.launch` writes, on a real SLURM cluster of two nodes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaasync.checkpoint.paths import checkpoints_in
from tests.support.cli import environment, metrics, pretrain, summary
from tests.support.restarts import RECIPE, assert_same_end
from tests.support.slurm import slurm_cluster

pytestmark = pytest.mark.slow("cluster")

CLUSTER = ["cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=null", "cluster.tasks_per_node=2"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The run without a cluster."""
    cwd = tmp_path_factory.mktemp("local")
    ran = pretrain(*RECIPE, "train.steps=60", "run.dir=run", cwd=cwd)
    assert ran.status == 0, ran.err
    return cwd / "run"


def launch(slurm, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "megaasync.launch", *CLUSTER, *RECIPE, *arguments],
        cwd=cwd,
        env=environment(SLURM_CONF=slurm.environment["SLURM_CONF"]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(slurm, script, cwd):
    """By hand, from anywhere."""
    done = subprocess.run(
        ["sbatch", script], cwd=cwd, env=environment(SLURM_CONF=slurm.environment["SLURM_CONF"]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()[-1]


def job_of(out):
    return next(line.split()[1] for line in out.splitlines() if line.startswith("job "))


def logs(folder):
    return "".join(path.read_text() for path in folder.glob("slurm-*.log"))


def test_two_nodes_give_the_local_runs_numbers(tmp_path, slurm, local):
    out = launch(slurm, "train.steps=60", "run.dir=run", cwd=tmp_path)
    job = job_of(out)
    assert f"squeue -j {job}" in out and f"slurm-{job}.log" in out
    assert slurm.wait(job) == "COMPLETED", logs(tmp_path / "run")
    assert_same_end(tmp_path / "run", local)
    told = logs(tmp_path / "run")
    assert "n0" in told and "n1" in told, "the preflight names the nodes"


def test_the_written_script_runs_unedited_from_another_folder(tmp_path, slurm, local):
    out = launch(slurm, "train.steps=60", "run.dir=run", "cluster.submit=false", cwd=tmp_path)
    assert "not submitted" in out and not (tmp_path / "run" / "metrics.jsonl").exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    job = submit(slurm, tmp_path / "run" / "job.sbatch", elsewhere)
    assert slurm.wait(job) == "COMPLETED", logs(tmp_path / "run")
    assert_same_end(tmp_path / "run", local)
    assert list(elsewhere.iterdir()) == []


def wait_for_step(folder, step, limit=120):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(logs(folder))


def test_a_signal_saves_requeues_and_goes_on_exactly(tmp_path, slurm, local):
    job = job_of(launch(slurm, "train.steps=60", "checkpoint.interval=1000", "run.dir=run", cwd=tmp_path))
    folder = tmp_path / "run"
    wait_for_step(folder, 3)
    slurm("scancel", "--signal=USR1", job)
    assert slurm.wait(job) == "COMPLETED", logs(folder)
    assert slurm.state(job)["Restarts"] == "1" and "saved; queued again" in logs(folder)
    first, second = metrics(folder, "start")
    assert first["step"] == 0 and 3 <= second["step"] < 60
    assert_same_end(folder, local)


def test_the_time_limit_saves_requeues_and_goes_on(tmp_path, slurm):
    """SLURM's limits are minutes; the signal comes up to a minute sooner than asked for."""
    job = job_of(
        launch(slurm, "train.steps=100000", "run.dir=run", "cluster.time=2", "cluster.signal_seconds=40", cwd=tmp_path)
    )
    folder = tmp_path / "run"
    deadline = time.monotonic() + 240
    while len(metrics(folder, "start") if (folder / "metrics.jsonl").exists() else []) < 2:
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.5)
    second = metrics(folder, "start")[1]
    assert second["step"] > 0 and Path(second["checkpoint"]).name == f"step_{second['step']:08d}"
    wait_for_step(folder, second["step"] + 1)
    slurm("scancel", "--signal=TERM", job)
    assert slurm.wait(job) == "FAILED"
    assert "130" in slurm.state(job)["ExitCode"], "asked to end for good, it is not queued again"
    assert summary(folder)["status"] == "interrupted"
    rows = [row["step"] for row in metrics(folder)]
    assert rows == list(range(1, len(rows) + 1)) and checkpoints_in(folder / "checkpoints")[-1].step == len(rows)


def test_a_failing_rank_fails_the_job(tmp_path, slurm):
    out = launch(slurm, "train.steps=60", "run.dir=run", "optimizer.lr=1e30", cwd=tmp_path)
    job = job_of(out)
    assert slurm.wait(job) == "FAILED", logs(tmp_path / "run")
    assert slurm.state(job)["ExitCode"] != "0:0"
    assert "error: " in logs(tmp_path / "run") and summary(tmp_path / "run")["status"] == "failed"


def test_a_sweep_is_an_array_with_a_folder_per_run(tmp_path, slurm):
    out = launch(slurm, "-m", "optimizer.lr=0.001,0.002,0.004", "train.steps=8", "run.dir=runs", cwd=tmp_path)
    job = job_of(out)
    deadline = time.monotonic() + 180
    while slurm("squeue", "-h", "-j", job).strip():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    runs = tmp_path / "runs"
    lrs = [metrics(runs / str(number))[-1]["lr"] for number in range(3)]
    assert lrs == [0.001, 0.002, 0.004], logs(runs)
    assert all(summary(runs / str(number))["status"] == "completed" for number in range(3))
    assert [slurm.state(f"{job}_{number}")["Restarts"] for number in range(3)] == ["0"] * 3
    assert len({metrics(runs / str(number))[-1]["loss"] for number in range(3)}) == 3


def test_one_run_of_an_array_is_queued_again_without_the_others(tmp_path, slurm):
    arguments = ["-m", "optimizer.lr=0.001,0.002", "train.steps=2000", "checkpoint.interval=1000", "run.dir=runs"]
    job = job_of(launch(slurm, *arguments, cwd=tmp_path))
    runs = tmp_path / "runs"
    wait_for_step(runs / "0", 3)
    slurm("scancel", "--signal=USR1", f"{job}_0")
    deadline = time.monotonic() + 120
    while "saved; queued again" not in logs(runs):
        assert time.monotonic() < deadline, logs(runs)
        time.sleep(0.2)
    time.sleep(1)
    assert slurm.state(f"{job}_0")["Restarts"] == "1"
    assert slurm.state(f"{job}_1")["Restarts"] == "0"
    slurm("scancel", job)


@pytest.mark.parametrize("edited", [False, True])
def test_a_wrong_input_that_rank_0_alone_finds_is_the_jobs_status(tmp_path, slurm, edited):
    """srun ends the other tasks and tells of that; it is not tried again either."""
    out = launch(slurm, "train.steps=8", "run.dir=run", "run.max_restarts=2", "cluster.submit=false", cwd=tmp_path)
    assert "not submitted" in out
    script = tmp_path / "run" / "job.sbatch"
    config = tmp_path / "run" / "config.yaml"
    if edited:  # which all ranks find
        config.write_text(config.read_text() + "# edited\n")
    else:
        (tmp_path / "run" / "metrics.jsonl").write_text(
            '{"kind": "start", "step": 0, "checkpoint": "/gone/step_1", "data": {}}\n'
        )
    job = submit(slurm, script, tmp_path)
    assert slurm.wait(job) == "FAILED"
    assert slurm.state(job)["ExitCode"] == "2:0", logs(tmp_path / "run")
    assert logs(tmp_path / "run").count("was changed after" if edited else "which is no longer whole") == 1


def test_a_job_from_a_users_own_config_folder_keeps_what_was_planned(tmp_path, slurm):
    """Launched from another folder, its YAML edited while it waits: the job trains what was planned."""
    conf, cwd = tmp_path / "conf", tmp_path / "elsewhere"
    (conf / "experiment").mkdir(parents=True)
    cwd.mkdir()
    mine = "# @package _global_\ntrain:\n  steps: {}\ncluster:\n  time: 00:10:00\n  env:\n    OCTAL: 0123\n"
    (conf / "experiment/mine.yaml").write_text(mine.format(12))
    waits = """cluster.extra_sbatch=["--begin=now+20"]"""
    out = launch(slurm, "--config-dir", "../conf", "experiment=mine", "run.dir=run", waits, cwd=cwd)
    (conf / "experiment/mine.yaml").write_text(mine.format(5))
    assert slurm.wait(job_of(out)) == "COMPLETED", logs(cwd / "run")
    assert summary(cwd / "run")["steps"] == 12 and len(metrics(cwd / "run")) == 12
    script = (cwd / "run/job.sbatch").read_text()
    assert "#SBATCH --time=00:10:00\n" in script and "export OCTAL=0123\n" in script
    refused = subprocess.run(
        [sys.executable, "-m", "megaasync.launch", *CLUSTER, *RECIPE, "cluster.partition=nowhere", "run.dir=other"],
        cwd=cwd, env=environment(SLURM_CONF=slurm.environment["SLURM_CONF"]), capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2 and "partition" in refused.stderr, refused.stderr
