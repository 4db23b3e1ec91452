"""A run in a container on this host."""

import os
from pathlib import Path

from megaasync.cluster.script import JobRun, hydra_quoted, own_mounts
from megaasync.config.schema import DockerCluster


def docker_command(cluster: DockerCluster, run: JobRun, *, directory: Path) -> list[str]:
    """The command line that runs in a container, as its user, what would run here.

    Args:
        cluster: of the config.
        run: the run; its cluster keys are left out, since in the container it is a run on its own host.
        directory: to work in; it and the run folder are mounted under their own names.
    """
    gpus = [] if cluster.gpus_per_node is None else ["--gpus", "all"]
    mounts = own_mounts(directory, run.folder) + list(cluster.mounts)
    overrides = [one for one in run.overrides if one.lstrip("+~").partition("=")[0].partition(".")[0] != "cluster"]
    local = ["cluster=local"] + ([] if not gpus else [f"cluster.gpus_per_node={cluster.gpus_per_node}"])
    return [
        "docker", "run", "--rm", *gpus, "--ipc=host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864",
        "--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp", "--workdir", str(directory),
        *(word for mount in mounts for word in ("--volume", mount)),
        *(word for name, value in cluster.env.items() for word in ("--env", f"{name}={value}")),
        cluster.container_image, "python", "-m", "megaasync.pretrain",
        *overrides, *local, f"run.dir={hydra_quoted(str(run.folder))}",
    ]  # fmt: skip
