"""Cluster keys, and what python -m megaasync.launch writes and refuses."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megaasync.cluster.submit import submit
from megaasync.config import ConfigError
from tests.support.cli import REPOSITORY, environment
from tests.support.configs import small_config
from tests.support.scripts import SMALL_JOB

WRONG = [
    ({"tasks_per_node": None}, "cluster.tasks_per_node=null: .*; set cluster.tasks_per_node=2"),
    ({"tasks_per_node": 2, "gpus_per_node": 1}, "cluster.tasks_per_node=2: every rank needs a GPU"),
    ({"nodes": 2}, "cluster.nodes=2: 2 x 2 ranks per node, .* = 2 ranks"),
    ({"time": "one day"}, "cluster.time=one day: cannot be read; give minutes"),
    (
        {"time": 2, "signal_seconds": 120},
        "cluster.signal_seconds=120: comes before .* cluster.time=2; set .* half .* 60",
    ),
    ({"time": "1-00:00", "signal_seconds": 43201}, "cluster.signal_seconds=43201: .* 43200"),
    ({"signal_seconds": 0}, "cluster.signal_seconds=0: must be at least 1"),
    ({"mounts": ["/data"]}, "cluster.mounts: '/data' cannot be read; give host:container"),
    ({"mounts": ["/a,b:/c"]}, "cluster.mounts: '/a,b:/c' cannot be read"),
    ({"env": {"A-B": "c"}}, "cluster.env.A-B: is no name"),
    ({"extra_sbatch": ["gres=gpu"]}, "cluster.extra_sbatch: 'gres=gpu' is no option"),
    ({"extra_sbatch": ["--a\nrm -rf"]}, "cluster.extra_sbatch.0=.*holds a line break"),
    ({"gpus_per_task": 2}, "cluster.gpus_per_task=2: a rank has one GPU; set 1, or null"),
    ({"extra_sbatch": ["--nodes=4"]}, "cluster.extra_sbatch: '--nodes=4' .*; set cluster.nodes instead"),
    ({"extra_sbatch": ["-t 10"]}, "'-t 10' would stand beside the script's --time; set cluster.time instead"),
    ({"extra_sbatch": ["--output=x"]}, "'--output=x' .*; leave it out"),
    ({"setup": ["a", "module load\nrm -rf"]}, "cluster.setup.1=.*holds a line break"),
    ({"env": {"A": "b\nc"}}, "cluster.env.A=.*holds a line break"),
    ({"partition": "a\nb"}, "cluster.partition=.*holds a line break"),
    ({"mounts": "x"}, "cluster.mounts='x': expected a list, as in 'cluster.mounts=\\[\"a\",\"b\"\\]'"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(item[0]) for item in WRONG])
def test_wrong_cluster_keys_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(cluster={**SMALL_JOB, **changes}, parallel__pipeline=2, checkpoint__interval=5)


def test_requeue_needs_checkpoints():
    with pytest.raises(ConfigError, match=r"cluster.requeue=true: .* set checkpoint.interval"):
        small_config(cluster=SMALL_JOB, parallel__pipeline=2, checkpoint__interval=None)


def launch(*arguments, cwd, **env):
    return subprocess.run(
        [sys.executable, "-m", "megaasync.launch", *arguments],
        cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=180,
    )  # fmt: skip


SLURM = [
    "cluster=slurm",
    "cluster.gpus_per_node=null",
    "cluster.tasks_per_node=2",
    "parallel.pipeline=2",
    "data=synthetic",
]


def test_launch_writes_a_job_and_says_how_to_submit_it(tmp_path):
    done = launch(*SLURM, "cluster.submit=false", "run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "environment.json", "job.sbatch", "plan.json", "overrides.txt"
    }  # fmt: skip
    assert "memory     per rank" in done.stdout and f"sbatch {folder / 'job.sbatch'}" in done.stdout
    record = json.loads((folder / "environment.json").read_text())
    assert record["packages"]["torch"] and re.fullmatch("[0-9a-f]{16}", record["code_hash"])
    assert re.fullmatch("[0-9a-f]{40}", record["git_commit"] or "0" * 40)
    text = (folder / "job.sbatch").read_text()
    assert "parallel.pipeline" not in text and "--run-config" in text
    assert (folder / "overrides.txt").read_text().splitlines() == SLURM
    assert record["config_sha256"] == hashlib.sha256((folder / "config.yaml").read_bytes()).hexdigest()


def test_launch_without_slurm_or_with_a_refusal_says_so(tmp_path, monkeypatch):
    only_python = {"PATH": str(Path(sys.executable).parent)}
    done = launch(*SLURM, "run.dir=run", cwd=tmp_path, **only_python)
    assert done.returncode == 2 and "there is no sbatch on this host" in done.stderr and "Traceback" not in done.stderr
    stub = tmp_path / "sbatch"
    stub.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: big' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="invalid partition specified: big; change the cluster"):
        submit(tmp_path / "job.sbatch")
    stub.write_text('#!/bin/sh\n[ "$1" = --test-only ] && exit 0\necho "77;cluster"\n')
    assert submit(tmp_path / "job.sbatch") == 77
    stub.write_text('#!/bin/sh\n[ "$1" = --test-only ] && echo "job violates its limits" >&2 && exit 1\necho 77\n')
    with pytest.raises(ConfigError, match="job violates its limits"):
        submit(tmp_path / "job.sbatch")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data=synthetic"], ["cluster=local", "set cluster=slurm"]),
        ([*SLURM, "train.steps=-1"], ["train.steps=-1", "at least 1"]),
        ([*SLURM, "cluster.nodes=2"], ["cluster.nodes=2", "parallel.data=auto"]),
        ([*SLURM, "cluster.partitoin=x"], ["cluster.partitoin", "did you mean cluster.partition"]),
        ([*SLURM, "run.dir=/proc/x"], ["run.dir=/proc/x", "all nodes see"]),
        (["-m", *SLURM, "cluster.time=100,200"], ["same cluster.* keys"]),
        (["-m", *SLURM, "train.seed=1,2", "hydra/launcher=joblib"], ["hydra/launcher", "one job array"]),
    ],
    ids=lambda v: v[-1],
)
def test_wrong_launches_leave_nothing(tmp_path, arguments, words):
    done = launch(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()
    message = next(line for line in last if line.startswith("error: "))
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_the_script_as_it_is_written(tmp_path):
    page = (REPOSITORY / "docs" / "cluster.md").read_text()
    command = page.split("The launch by itself")[1].split("```bash\n")[1].split("```")[0]
    words = shlex.split(command.replace("\\\n", " "))
    done = launch(*words[3:], "cluster.submit=false", "cluster.check_files=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "runs" / "moe10b" / "job.sbatch").read_text().replace(str(tmp_path), "/shared/me")
    shown = page.split("## The script that it writes")[1].split("```bash\n")[1].split("```")[0]
    assert shown.splitlines()[2:] == written.splitlines()[2:]
