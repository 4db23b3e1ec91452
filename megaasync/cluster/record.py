"""What a run was made of: versions, code and config, as a record and as a hash that every node can compare."""

import getpass
import hashlib
import os
import platform
import socket
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "datasets", "sentencepiece", "transformer-engine", "wandb")
LAUNCH_RECORD = "environment.json"  # in the run folder


def _output_of(*command: str, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment_record(package: Path, *, command: str) -> dict[str, Any]:
    """Who, where, with what.

    Args:
        package: folder of the code, whose git commit is recorded.
        command: as typed, without secrets.
    """
    versions = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    status = _output_of("git", "status", "--porcelain", cwd=package)
    user = str(os.getuid())
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "directory": str(Path.cwd()),
        "user": user,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": _output_of("git", "rev-parse", "HEAD", cwd=package),
        "git_is_changed": None if status is None else bool(status),
        "gpu_driver": _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
    }


def code_hash(package: Path) -> str:
    """Hash every Python file of the package with its name; a checkout and an installation of it have the same hash.

    The tools, which an installation has inside the package, are left out: no run imports them.
    """
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.is_relative_to(package / "tools"):
            continue
        found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
