"""Handing a script to SLURM, and knowing which job a run folder waits for."""

import json
import re
import subprocess
from pathlib import Path

from megaasync.cluster.record import LAUNCH_RECORD
from megaasync.config import ConfigError


def _sbatch(script: Path, *options: str) -> str:
    try:
        done = subprocess.run(["sbatch", *options, str(script)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"cluster=slurm: there is no sbatch on this host ({error.strerror}); log in to the cluster and run: sbatch "
            f"{script}; or set cluster.submit=false to only write it"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise ConfigError(f"sbatch {script}: {said}; change the cluster.* key that it speaks of")
    return done.stdout


def submit(script: Path) -> int:
    """sbatch a script, after a look at whether the cluster could ever run it.

    Returns:
        The job's number.

    Raises:
        ConfigError: there is no sbatch, or it refuses; what it said is in the message.
    """
    _sbatch(script, "--test-only")
    said = _sbatch(script, "--parsable").strip()
    match = re.search(r"(\d+)(;\S+)?$", said)
    if match is None:
        raise ConfigError(f"sbatch {script}: said {said!r}, which has no job's number; look at squeue")
    return int(match.group(1))


def note_job(folder: Path, number: int) -> None:
    """Write down which job a run folder waits for."""
    path = folder / LAUNCH_RECORD
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"job": number}, indent=2) + "\n")


def check_no_job(folder: Path) -> None:
    """No job that has not ended runs in a folder: it would find another config there than it was planned with.

    Raises:
        ConfigError: names the job.
    """
    try:
        number = json.loads((folder / LAUNCH_RECORD).read_text()).get("job")
        done = subprocess.run(
            ["squeue", "-h", "-j", str(number), "-o", "%T"], capture_output=True, text=True, check=False
        )
    except (OSError, ValueError, AttributeError):
        return
    if number is not None and done.returncode == 0 and (states := done.stdout.split()):
        raise ConfigError(
            f"run.dir={folder}: job {number} ({states[0].lower()}) runs there; end it first with scancel {number}, or "
            "choose another folder"
        )
