"""Rules of the cluster: ranks, and what is written into a batch script."""

import re
from dataclasses import fields

from megaasync.config.schema import Config, ConfigError, DockerCluster, SlurmCluster


def check_cluster(config: Config) -> None:
    """The cluster has ranks for the layout."""
    cluster = config.cluster
    ranks = cluster.ranks_per_node
    if ranks is not None and cluster.nodes * ranks != config.world_size:
        layout = config.parallel_dims
        raise ConfigError(
            f"cluster.nodes={cluster.nodes}: {cluster.nodes} x {ranks} ranks per node, but tensor("
            f"{layout.tensor}) x expert({layout.expert}) x pipeline({layout.pipeline}) x data({layout.data}) = "
            f"{layout.world_size} ranks; set parallel.data=auto or degrees that multiply to the cluster's"
        )
    if isinstance(cluster, SlurmCluster | DockerCluster):
        _check_lines(cluster)
    if isinstance(cluster, SlurmCluster):
        _check_slurm(config, cluster)
    if isinstance(cluster, SlurmCluster | DockerCluster):
        _check_container(cluster)


def _check_slurm(config: Config, cluster: SlurmCluster) -> None:
    if cluster.ranks_per_node is None:
        raise ConfigError(
            "cluster.tasks_per_node=null: with cluster.gpus_per_node=null too nothing says how many ranks a node has; "
            f"set cluster.tasks_per_node={max(config.world_size // cluster.nodes, 1)}"
        )
    if cluster.gpus_per_node is not None and cluster.ranks_per_node > cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.tasks_per_node={cluster.tasks_per_node}: every rank needs a GPU of its own, but "
            f"cluster.gpus_per_node={cluster.gpus_per_node}; set it to null for ranks without GPUs"
        )
    if cluster.gpus_per_task not in (None, 1):
        raise ConfigError(f"cluster.gpus_per_task={cluster.gpus_per_task}: a rank has one GPU; set 1, or null")
    limit = None if cluster.time is None else _limit_of(cluster.time)
    if limit is not None and cluster.signal_seconds > limit / 2:
        raise ConfigError(
            f"cluster.signal_seconds={cluster.signal_seconds}: comes before training does at cluster.time="
            f"{cluster.time}; set at most half of it, {limit // 2}"
        )
    if cluster.requeue and config.checkpoint.interval is None:
        raise ConfigError(
            "cluster.requeue=true: the job goes on from a checkpoint, but checkpoint.interval=null makes none; set "
            "checkpoint.interval, or cluster.requeue=false"
        )
    _check_extra_sbatch(cluster)


_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}")


_MOST_MINUTES = (
    7 * 24 * 60
)  # in a bare number; more is a mistake of units, or of a YAML reader that made a number of it


def _limit_of(time: str) -> int | None:
    """Seconds of a time limit as sbatch reads it; None for no limit.

    Raises:
        ConfigError: it is none.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    forms = (
        "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
    )
    if not _TIME.fullmatch(time):
        raise ConfigError(f"cluster.time={time}: cannot be read; give {forms}, as in cluster.time=24:00:00")
    if time.isdecimal() and int(time) > _MOST_MINUTES:
        days, hours = int(time) // 1440, int(time) % 1440 // 60
        raise ConfigError(
            f"cluster.time={time}: a bare number is minutes, and these are {int(time) / 1440:.0f} days; if you mean "
            f"that write {days}-{hours:02}:00:00, if you mean seconds write {int(time) // 3600}:"
            f"{int(time) % 3600 // 60:02}:{int(time) % 60:02}"
        )
    return _seconds(time)


# options of sbatch that the script has already, and the key behind each; None where there is no choice
_OWN_OPTIONS: dict[str, str | None] = {
    **{name: name.replace("-", "_") for name in (
        "job-name", "nodes", "gpus-per-node", "gpus-per-task", "gres", "mem", "cpus-per-task", "time", "partition",
        "account", "qos", "constraint", "exclude", "reservation", "comment", "mail-type", "mail-user", "dependency",
        "nice", "wckey", "exclusive", "requeue",
    )},
    "ntasks-per-node": "tasks_per_node", "no-requeue": "requeue", "signal": "signal_seconds",
    "array": None, "chdir": None, "output": None, "open-mode": None, "ntasks": None, "export": None,
}  # fmt: skip


_SHORT_OPTIONS = {
    "J": "job-name", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "p": "partition", "A": "account",
    "q": "qos", "C": "constraint", "x": "exclude", "d": "dependency", "a": "array", "D": "chdir", "o": "output",
}  # fmt: skip


def _check_extra_sbatch(cluster: SlurmCluster) -> None:
    for line in cluster.extra_sbatch:
        match = re.fullmatch(r"--([a-z][a-z-]*)([= ].*)?|-([A-Za-z])(.*)", line)
        if match is None:
            raise ConfigError(
                f"cluster.extra_sbatch: {line!r} is no option of sbatch; give options as in "
                """'cluster.extra_sbatch=["--switches=1","--mcs-label=x"]'"""
            )
        option = match.group(1) or _SHORT_OPTIONS.get(match.group(3), match.group(3))
        if option in _OWN_OPTIONS:
            key = _OWN_OPTIONS[option]
            remedy = "leave it out, the script needs its own" if key is None else f"set cluster.{key} instead"
            raise ConfigError(f"cluster.extra_sbatch: {line!r} would stand beside the script's --{option}; {remedy}")


def _check_lines(cluster: SlurmCluster | DockerCluster) -> None:
    """Nothing that is written into a script spans lines: the rest of it would be commands."""
    for field in fields(cluster):
        value = getattr(cluster, field.name)
        several = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
        for name, text in [("", value), *((f".{name}", inner) for name, inner in several)]:
            if isinstance(text, str) and ("\n" in text or "\r" in text):
                raise ConfigError(
                    f"cluster.{field.name}{name}={text!r}: holds a line break, which no script of a job can; write "
                    "one line, or several entries of a list"
                )


def _seconds(time: str) -> int:
    """Of a time as sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) == 2 else 0
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_container(cluster: SlurmCluster | DockerCluster) -> None:
    for mount in cluster.mounts:
        if not re.fullmatch(r"[^:,]+:[^:,]+(:[a-z,]+)?", mount):
            raise ConfigError(
                f"cluster.mounts: {mount!r} cannot be read; give host:container, as in "
                """'cluster.mounts=["/data:/data"]'"""
            )
    for name in (*cluster.env, *cluster.secrets):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"cluster.env.{name}: is no name of an environment variable; use letters, digits and _")
    if cluster.name == "docker" and cluster.nodes != 1:
        raise ConfigError(f"cluster.nodes={cluster.nodes}: docker runs on this host only; set cluster.nodes=1")
