"""The batch script of a SLURM job: readable, complete, the same whoever submits it from wherever."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaasync.config.schema import SlurmCluster

REQUEUE = ".requeue"  # in the run folder: the run ended to be started again
ENDED = ".ended"  # there: status of the rank that ended first, and whether that is `final`
FLAG = "--run-config"  # of megaasync.pretrain: the config.yaml of a run folder, as it was launched
_SIGNALLED = "USR1"


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job; a job array has several.

    Attributes:
        folder: the run folder, absolute, with the config.yaml that is run.
    """

    folder: Path


@dataclass(frozen=True, slots=True)
class Job:
    """What a batch script is written from.

    Attributes:
        name: of the job.
        cluster: of its config.
        runs: one, or those of an array.
        folder: where the script and SLURM's log go, absolute.
        directory: to start in, absolute.
        python: command that runs Python in the job.
        data_folders: what the runs read and keep beside their folders, for containers.
        max_restarts: times that the step is started again within the job when it fails, without progress between.
        made: when and by what, for the first line.
    """

    name: str
    cluster: SlurmCluster
    runs: tuple[JobRun, ...]
    folder: Path
    directory: Path
    python: str
    data_folders: tuple[Path, ...]
    max_restarts: int
    made: str

    @property
    def is_array(self) -> bool:
        """Whether there are several runs, numbered from 0."""
        return len(self.runs) > 1


def hydra_quoted(value: str) -> str:
    """A value as Hydra reads it back whole, whatever is in it."""
    escaped = value.replace('\\"', '\\\\"').replace('"', '\\"').replace("${", "\\${")
    return f'"{escaped}"'


def _directives(job: Job) -> list[str]:
    cluster = job.cluster
    asks_otherwise = cluster.gpus_per_task is not None or "gpu" in (cluster.gres or "")
    values = {
        "job-name": cluster.job_name or job.name,
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.ranks_per_node,
        "gpus-per-node": None if asks_otherwise else cluster.gpus_per_node,
        "gpus-per-task": cluster.gpus_per_task,
        "gres": cluster.gres,
        "mem": cluster.mem,
        "cpus-per-task": cluster.cpus_per_task,
        "time": cluster.time,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "reservation": cluster.reservation,
        "comment": cluster.comment,
        "mail-type": cluster.mail_type,
        "mail-user": cluster.mail_user,
        "dependency": cluster.dependency,
        "nice": cluster.nice,
        "wckey": cluster.wckey,
        "array": f"0-{len(job.runs) - 1}" if job.is_array else None,
        "chdir": job.directory,
        # %A and %a in an array, %j else; a job that is queued again goes on in the same log
        "output": f"{str(job.folder).replace('%', '%%')}/slurm-{'%A_%a' if job.is_array else '%j'}.log",
        "open-mode": "append",
        "signal": f"{_SIGNALLED}@{cluster.signal_seconds}",
    }
    lines = [f"#SBATCH --{name}={_in_directive(str(value))}" for name, value in values.items() if value is not None]
    lines += ["#SBATCH --exclusive"] if cluster.exclusive else []
    lines.append("#SBATCH --requeue" if cluster.requeue else "#SBATCH --no-requeue")
    return lines + [f"#SBATCH {option}" for option in cluster.extra_sbatch]


def _in_directive(value: str) -> str:
    """sbatch splits its directives at blanks, outside of double quotes."""
    return '"' + value.replace('"', '\\"') + '"' if any(letter in value for letter in " \t'\"#;") else value


def _runs(job: Job) -> list[str]:
    """The run folder, of the one run or of this task of the array."""
    if not job.is_array:
        return [f"run_dir={shlex.quote(str(job.runs[0].folder))}"]
    lines = ['case "$SLURM_ARRAY_TASK_ID" in']
    lines += [f"{number}) run_dir={shlex.quote(str(run.folder))} ;;" for number, run in enumerate(job.runs)]
    return [*lines, "esac"]


def own_mounts(*folders: Path, given: Sequence[str] = ()) -> list[str]:
    """Folders that a container needs, under their own names; those inside of others come with them.

    A folder that is a link, or lies behind one, is mounted where it really is too: inside, the link leads there.

    Args:
        folders: absolute.
        given: the user's mounts, as host:container; what they show under its own name is not mounted again.
    """
    wanted = dict.fromkeys(path for folder in folders for path in (folder, Path(os.path.realpath(folder))))
    shown = [
        Path(host)
        for host, _, container in (mount.partition(":") for mount in given)
        if container.split(":")[0] == host
    ]
    outer = [folder for folder in wanted if not any(other in folder.parents for other in wanted)]
    return [f"{folder}:{folder}" for folder in outer if not any(other in (folder, *folder.parents) for other in shown)]


def _container(job: Job) -> tuple[list[str], list[str]]:
    """Options of srun, and what stands before Python."""
    cluster = job.cluster
    if cluster.container_image is None:
        return [], []
    folders = (job.directory, *(run.folder for run in job.runs), *job.data_folders)
    mounts = own_mounts(*folders, given=cluster.mounts) + list(cluster.mounts)
    if cluster.container_runtime == "pyxis":
        return [
            f"--container-image={cluster.container_image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={job.directory}",
        ], []
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return [], ["apptainer", "exec", "--nv", *binds, "--pwd", str(job.directory), cluster.container_image]


def render_script(job: Job) -> str:
    """The text of the script."""
    cluster = job.cluster
    srun_options, before_python = _container(job)
    modules = [f"module load {shlex.join(cluster.modules)}"] if cluster.modules else []
    set_up = [
        *modules,
        *cluster.setup,
        *(f"export {name}={shlex.quote(str(value))}" for name, value in cluster.env.items()),
    ]
    step = [
        # srun does not take it from sbatch
        *([] if cluster.cpus_per_task is None else [f"    --cpus-per-task={cluster.cpus_per_task} \\"]),
        *(f"    {shlex.quote(option)} \\" for option in srun_options),
        f"    {' '.join([*map(shlex.quote, before_python), job.python])} -m megaasync.pretrain "
        f'{FLAG} "$run_dir/config.yaml" "${{again[@]}}"',
    ]
    lines = [
        "#!/bin/bash",
        f"# {job.made}",
        f"# Submit it again, from anywhere: sbatch {shlex.quote(str(job.folder / 'job.sbatch'))}",
        *_directives(job),
        "",
        *(["# Set-up and environment of the job (cluster.modules, .setup, .env)", *set_up, ""] if set_up else []),
        *_secret_lines(cluster),
        f"# What is run: its config.yaml{', by the number in the array' if job.is_array else ''}",
        *_runs(job),
        "",
        "# Where the ranks meet: on the first node, at a free port that is not in the ephemeral range",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000))",
        "while awk '{ print $2, $4 }' /proc/net/tcp /proc/net/tcp6 2>/dev/null |",
        '        grep -qi ":$(printf %04X "$MASTER_PORT") 0A"; do',
        "    MASTER_PORT=$((MASTER_PORT + 1))",
        "done",
        "export MASTER_ADDR MASTER_PORT",
        "",
        *_step_lines(job, step),
        "",
        *_requeue_lines(job),
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _secret_lines(cluster: SlurmCluster) -> list[str]:
    if not cluster.secrets:
        return []
    return [
        "# Secrets are in no file: sbatch hands on the environment that it is called in",
        f"for name in {shlex.join(cluster.secrets)}; do",
        '    [ -n "${!name}" ] && continue',
        '    echo "error: $name is not set where sbatch was called; export it there" >&2',
        "    exit 2",
        "done",
        "",
    ]


def _step_lines(job: Job, step: list[str]) -> list[str]:
    again = [
        "# After a requeue or a second submission the run continues from its own newest checkpoint, even if it was",
        "# first started from another one",
        "again=()",
        "goes_on() { again=(--goes-on); }",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then goes_on; fi',
        "",
    ]
    srun = [
        f'rm -f "$run_dir/{REQUEUE}" "$run_dir/{ENDED}"',
        "srun --kill-on-bad-exit=1 \\",
        *step,
        "status=$? verdict=again",
        "# srun returns the highest status of its tasks; we want that of the rank that ended first, which it has saved",
        f'if [ -s "$run_dir/{ENDED}" ]; then read -r status verdict < "$run_dir/{ENDED}"; fi',
    ]
    if not job.max_restarts:
        return [*again, "# The ranks, one per task. A rank that fails ends the others.", *srun]
    return [
        *again,
        "# The ranks, one per task. A rank that fails ends the others; then all start again from the last checkpoint,",
        f"# at most {job.max_restarts} times (run.max_restarts) without a newer checkpoint between, after a pause that",
        "# doubles: not after wrong input, a stop, or numbers gone bad.",
        'newest() { ls -d "$run_dir"/checkpoints/step_*/COMPLETE.json 2>/dev/null | tail -n 1; }',
        "restarts=0 before=$(newest)",
        "while true; do",
        *(f"    {line}" for line in srun),
        f'    if [ "$status" -eq 0 ] || [ "$verdict" = final ] || [ -e "$run_dir/{REQUEUE}" ]; then break; fi',
        "    now=$(newest)",
        '    if [ "$now" != "$before" ]; then restarts=0 before=$now; fi',
        f'    if [ "$restarts" -ge {job.max_restarts} ]; then break; fi',
        "    pause=$((2 ** restarts < 60 ? 2 ** restarts : 60)) restarts=$((restarts + 1))",
        f'    echo "restart $restarts of {job.max_restarts} since the last progress, in $pause s"',
        '    sleep "$pause"',
        "    goes_on",
        "done",
    ]


def _requeue_lines(job: Job) -> list[str]:
    if not job.cluster.requeue:
        return []
    number = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if job.is_array else "$SLURM_JOB_ID"
    return [
        "# Told to save and end (SIGUSR1, before the time limit or by scancel --signal=USR1): queue the job again. It",
        "# goes on in the same folder from its last checkpoint.",
        f'if [ -e "$run_dir/{REQUEUE}" ]; then',
        f'    rm -f "$run_dir/{REQUEUE}"',
        '    echo "saved; queued again"',
        f'    scontrol requeue "{number}" && exit 0',
        "fi",
    ]
