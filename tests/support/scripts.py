"""Batch scripts run by bash, with stand-ins for srun and scontrol."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megaasync.cluster.script import Job, JobRun, render_script
from megaasync.config import read
from megaasync.config.schema import SlurmCluster
from tests.entry.test_text_values import SLURM as ANY_SLURM

SMALL_JOB = {**ANY_SLURM, "tasks_per_node": 2, "requeue": True}


SRUN = f"""#!{sys.executable}
import json, os, pathlib, sys
calls = pathlib.Path(os.environ["CALLS"])
with calls.open("a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}) + "\\n")
run = pathlib.Path(sys.argv[sys.argv.index("--run-config") + 1]).parent
if (calls.parent / "marks").exists():
    (run / ".requeue").touch()
statuses = os.environ.get("STATUSES", "0").split(",")
if "PROGRESS" in os.environ:
    made = run / "checkpoints" / f"step_{{len(calls.read_text().splitlines()):08}}"
    made.mkdir(parents=True)
    (made / "COMPLETE.json").touch()
if "ENDED" in os.environ:
    (run / ".ended").write_text(os.environ["ENDED"] + "\\n")
sys.exit(int(statuses[min(len(calls.read_text().splitlines()), len(statuses)) - 1]))
"""


SCONTROL = """#!/bin/sh
echo "$@" >> "$CALLS.scontrol"
[ "$1" = show ] && echo n0 && echo n1
true
"""


def cluster_of(**changes):
    return read(SlurmCluster, {**SMALL_JOB, **changes}, "cluster")


def job_of(folder, max_restarts=0, runs=None, data_folders=(), **changes):
    return Job(
        name="name",
        cluster=cluster_of(**changes),
        runs=runs or (JobRun(folder),),
        folder=folder,
        directory=folder,
        python="python",
        data_folders=data_folders,
        max_restarts=max_restarts,
        made="Written by a test.",
    )


def run_script(job, tmp_path, **env):
    """Run a script with stubs of SLURM's commands; (status, calls of srun, calls of scontrol)."""
    stubs = tmp_path / "stubs"
    stubs.mkdir(exist_ok=True)
    (stubs / "srun").write_text(SRUN)
    (stubs / "scontrol").write_text(
        '#!/bin/sh\necho "$@" >> "$CALLS.scontrol"\n[ "$1" = show ] && echo n0 && echo n1\ntrue\n'
    )
    (stubs / "sleep").write_text('#!/bin/sh\necho "$1" >> "$CALLS.sleep"\n')
    for name in ("srun", "scontrol", "sleep"):
        (stubs / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(render_script(job))
    calls = tmp_path / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", script],
        env={
            "PATH": f"{stubs}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "n[0-1]", **env,
        },
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stderr == "", done.stderr
    asked = Path(f"{calls}.scontrol")
    return (
        done.returncode,
        [json.loads(line) for line in calls.read_text().splitlines()],
        asked.read_text() if asked.exists() else "",
    )
