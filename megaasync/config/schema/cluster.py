"""Where a run is started: group `cluster`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaasync.fields import Range


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """This host.

    Attributes:
        nodes, gpus_per_node: what a plan and `parallel.data=auto` count with; null for this host as it is started.
        gpu_memory_gib: of one GPU; a plan warns of what does not fit. null for unknown.
        gpu_tflops: what one GPU reaches in matrix products, for a plan's times; null for no times.
        network_gbytes: per second that one GPU sends to another node.
    """

    name: Literal["local"]
    nodes: Annotated[int, Range(at_least=1)]
    gpus_per_node: Annotated[int | None, Range(at_least=1)]
    gpu_memory_gib: Annotated[float | None, Range(above=0, remedy="set null if unknown")]
    gpu_tflops: Annotated[float | None, Range(above=0, remedy="set null if unknown")]
    network_gbytes: Annotated[float | None, Range(above=0, remedy="set null if unknown")]

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node; None for as many as the layout needs."""
        return self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A SLURM cluster; `python -m megaasync.launch` writes and submits the job.

    Attributes:
        nodes, gpus_per_node, gpu_memory_gib, gpu_tflops, network_gbytes: as of `local`; without GPUs null.
        tasks_per_node: ranks on each node; null takes gpus_per_node.
        gpus_per_task: one GPU bound to each rank, in the place of gpus_per_node's for the node.
        cpus_per_task: cores of each rank; null leaves that to the cluster.
        partition, account, qos, constraint, exclude, reservation: as sbatch's; null leaves them out.
        comment, mail_type, mail_user, dependency, nice, wckey: as sbatch's; null leaves them out.
        mem, gres: as sbatch's; a gres with GPUs takes the place of gpus_per_node's request.
        job_name: null takes the run folder's.
        exclusive: whole nodes.
        time: in any form that sbatch takes, as 90 (minutes), 24:00:00 or 2-12 (days-hours); null is the partition's.
        signal_seconds: before the time limit, when the ranks are told to save and the job is queued again.
        requeue: queue the job again at its time limit and when a node fails; it goes on from its last checkpoint.
        container_image: an image to run in; null for none.
        container_runtime: `pyxis` (srun --container-image) or `apptainer`.
        mounts: of the container, as host:container; the working folder and the run folder are added.
        env: environment variables, set as they are. Secrets among them move to `secrets`.
        secrets: names of variables that the job takes from the environment that it is submitted from.
        modules: of `module load`, before setup.
        setup: lines of shell before the job's steps.
        extra_sbatch: further options of sbatch, as --gres=gpu:h200:8.
        python: command that runs Python; null takes the launcher's own, or `python` in a container.
        submit: false only writes the job.
        check_files: look for tokens, tokenizer and checkpoint on this host before submitting.
        preflight: look at all nodes before the first step.
    """

    name: Literal["slurm"]
    nodes: Annotated[int, Range(at_least=1)]
    gpus_per_node: Annotated[int | None, Range(at_least=1)]
    gpu_memory_gib: Annotated[float | None, Range(above=0, remedy="set null if unknown")]
    gpu_tflops: Annotated[float | None, Range(above=0, remedy="set null if unknown")]
    network_gbytes: Annotated[float | None, Range(above=0, remedy="set null if unknown")]
    tasks_per_node: Annotated[int | None, Range(at_least=1)]
    gpus_per_task: Annotated[int | None, Range(at_least=1)] = None
    cpus_per_task: Annotated[int | None, Range(at_least=1)]
    job_name: str | None = None
    mem: str | None = None
    gres: str | None = None
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    exclude: str | None
    reservation: str | None
    time: str | None
    comment: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    dependency: str | None = None
    exclusive: bool = False
    nice: int | None = None
    wckey: str | None = None
    signal_seconds: Annotated[int, Range(at_least=1)]
    requeue: bool
    container_image: str | None
    container_runtime: Literal["pyxis", "apptainer"]
    mounts: tuple[str, ...]
    env: dict[str, str]
    secrets: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...]
    extra_sbatch: tuple[str, ...]
    python: str | None
    submit: bool
    check_files: bool = True
    preflight: bool

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node; None for as many as the layout needs."""
        return self.tasks_per_node or self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerCluster:
    """Containers on this host; `python -m megaasync.launch` writes and starts one.

    Attributes:
        nodes, gpus_per_node, gpu_memory_gib, gpu_tflops, network_gbytes: as of `local`; nodes must be 1.
        container_image: image to run, as `docker build -t` named it.
        mounts: as host:container; the working folder and the run folder are added.
        env: environment variables, set as they are. Secrets among them move to `secrets`.
        secrets: names of variables that the container takes from the environment that it is started from.
        submit: false only writes the command.
        check_files: look for tokens, tokenizer and checkpoint on this host before the start.
    """

    name: Literal["docker"]
    nodes: Annotated[int, Range(at_least=1)]
    gpus_per_node: Annotated[int | None, Range(at_least=1)]
    gpu_memory_gib: Annotated[float | None, Range(above=0, remedy="set null if unknown")]
    gpu_tflops: Annotated[float | None, Range(above=0, remedy="set null if unknown")]
    network_gbytes: Annotated[float | None, Range(above=0, remedy="set null if unknown")]
    container_image: str
    mounts: tuple[str, ...]
    env: dict[str, str]
    secrets: tuple[str, ...] = ()
    submit: bool
    check_files: bool = True

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node; None for as many as the layout needs."""
        return self.gpus_per_node


ClusterConfig = LocalCluster | SlurmCluster | DockerCluster
