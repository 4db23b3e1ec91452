"""Handing a script to SLURM."""

import re
import subprocess
from pathlib import Path

from megaasync.config import ConfigError


def submit(script: Path) -> int:
    """sbatch a script.

    Returns:
        The job's number.

    Raises:
        ConfigError: there is no sbatch, or it refuses; what it said is in the message.
    """
    try:
        done = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"cluster=slurm: there is no sbatch on this host; log in to the cluster and run: sbatch {script}; or set "
            "cluster.submit=false to only write it"
        ) from None
    match = re.search(r"Submitted batch job (\d+)", done.stdout)
    if done.returncode or match is None:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise ConfigError(f"sbatch {script}: {said}; change the cluster.* key that it speaks of")
    return int(match.group(1))
