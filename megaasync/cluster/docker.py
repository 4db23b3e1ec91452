"""A run in a container on this host."""

import os
from collections.abc import Sequence
from pathlib import Path

from megaasync.cluster.script import FLAG, JobRun, own_mounts
from megaasync.config.schema import DockerCluster


def docker_command(
    cluster: DockerCluster, run: JobRun, *, directory: Path, data_folders: Sequence[Path] = ()
) -> list[str]:
    """The command line that runs in a container, as its user, what would run here.

    Args:
        cluster: of the config.
        run: the run, whose config.yaml is run.
        directory: to work in; it and the run folder are mounted under their own names.
        data_folders: what the run reads and keeps elsewhere; mounted too.
    """
    gpus = [] if cluster.gpus_per_node is None else ["--gpus", "all"]
    mounts = own_mounts(directory, run.folder, *data_folders, given=cluster.mounts) + list(cluster.mounts)
    return [
        "docker", "run", "--rm", *gpus, "--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864",
        "--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp", "--workdir", str(directory),
        *(word for mount in mounts for word in ("--volume", mount)),
        *(word for name, value in cluster.env.items() for word in ("--env", f"{name}={value}")),
        *(word for name in cluster.secrets for word in ("--env", name)),  # docker takes their values from here
        cluster.container_image, "python", "-m", "megaasync.pretrain", FLAG, str(run.folder / "config.yaml"),
    ]  # fmt: skip
