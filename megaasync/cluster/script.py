"""The batch script of a SLURM job: readable, complete, the same whoever submits it from wherever."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaasync.config.schema import SlurmCluster

REQUEUE = ".requeue"  # in the run folder: the run ended to be started again
ENDED = ".ended"  # there: status of the rank that ended first, and whether that is `final`
_SIGNALLED = "USR1"


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job; a job array has several.

    Attributes:
        folder: the run folder, absolute.
        overrides: of `python -m megaasync.pretrain`, as the user typed them; run.dir comes on top.
    """

    folder: Path
    overrides: tuple[str, ...]


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
        max_restarts: times that the step is started again within the job when it fails.
        made: when and by what, for the first line.
    """

    name: str
    cluster: SlurmCluster
    runs: tuple[JobRun, ...]
    folder: Path
    directory: Path
    python: str
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
    values = {
        "job-name": job.name,
        "nodes": cluster.nodes,
        "ntasks-per-node": cluster.ranks_per_node,
        "gpus-per-node": cluster.gpus_per_node,
        "cpus-per-task": cluster.cpus_per_task,
        "time": cluster.time,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "reservation": cluster.reservation,
        "array": f"0-{len(job.runs) - 1}" if job.is_array else None,
        "chdir": job.directory,
        # %A and %a in an array, %j else; a job that is queued again goes on in the same log
        "output": f"{str(job.folder).replace('%', '%%')}/slurm-{'%A_%a' if job.is_array else '%j'}.log",
        "open-mode": "append",
        "signal": f"{_SIGNALLED}@{cluster.signal_seconds}",
    }
    lines = [f"#SBATCH --{name}={_in_directive(str(value))}" for name, value in values.items() if value is not None]
    lines.append("#SBATCH --requeue" if cluster.requeue else "#SBATCH --no-requeue")
    return lines + [f"#SBATCH {option}" for option in cluster.extra_sbatch]


def _in_directive(value: str) -> str:
    """sbatch splits its directives at blanks, outside of double quotes."""
    return '"' + value.replace('"', '\\"') + '"' if any(letter in value for letter in " \t'\"#;") else value


def _array(name: str, values: Sequence[str], *, indent: str) -> list[str]:
    if not values:
        return [f"{indent}{name}=()"]
    return [f"{indent}{name}=(", *(f"{indent}    {shlex.quote(value)}" for value in values), f"{indent})"]


def _runs(job: Job) -> list[str]:
    """The run folder and overrides, of the one run or of this task of the array."""

    def of(run: JobRun, indent: str) -> list[str]:
        overrides = [*run.overrides, f"run.dir={hydra_quoted(str(run.folder))}"]
        return [f"{indent}run_dir={shlex.quote(str(run.folder))}", *_array("overrides", overrides, indent=indent)]

    if not job.is_array:
        return of(job.runs[0], "")
    lines = ['case "$SLURM_ARRAY_TASK_ID" in']
    for number, run in enumerate(job.runs):
        lines += [f"{number})", *of(run, "    "), "    ;;"]
    return [*lines, "esac"]


def own_mounts(*folders: Path) -> list[str]:
    """Folders that a container needs, under their own names; those inside of others come with them."""
    outer = [one for one in dict.fromkeys(folders) if not any(other in one.parents for other in folders)]
    return [f"{folder}:{folder}" for folder in outer]


def _container(job: Job) -> tuple[list[str], list[str]]:
    """Options of srun, and what stands before Python."""
    cluster = job.cluster
    if cluster.container_image is None:
        return [], []
    mounts = own_mounts(job.directory, *(run.folder for run in job.runs)) + list(cluster.mounts)
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
    set_up = [*cluster.setup, *(f"export {name}={shlex.quote(str(value))}" for name, value in cluster.env.items())]
    step = [
        # srun does not take it from sbatch
        *([] if cluster.cpus_per_task is None else [f"    --cpus-per-task={cluster.cpus_per_task} \\"]),
        *(f"    {shlex.quote(option)} \\" for option in srun_options),
        f'    {" ".join([*map(shlex.quote, before_python), job.python])} -m megaasync.pretrain "${{overrides[@]}}"',
    ]
    lines = [
        "#!/bin/bash",
        f"# {job.made}",
        f"# Submit it again, from anywhere: sbatch {shlex.quote(str(job.folder / 'job.sbatch'))}",
        *_directives(job),
        "",
        *(["# Set-up and environment of the job (cluster.setup, cluster.env)", *set_up, ""] if set_up else []),
        "# What is run" + (", by the number in the array" if job.is_array else ""),
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


def _step_lines(job: Job, step: list[str]) -> list[str]:
    again = [
        "# Queued or started again, the run goes on from its own newest checkpoint, whatever it was begun from",
        "goes_on() { overrides+=(checkpoint.resume=auto); }",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then goes_on; fi',
        "",
    ]
    srun = [
        f'rm -f "$run_dir/{REQUEUE}" "$run_dir/{ENDED}"',
        "srun --kill-on-bad-exit=1 \\",
        *step,
        "status=$? verdict=again",
        "# srun tells the highest status of its tasks; the rank that ended first has written down its own",
        f'if [ -s "$run_dir/{ENDED}" ]; then read -r status verdict < "$run_dir/{ENDED}"; fi',
    ]
    if not job.max_restarts:
        return [*again, "# The ranks, one per task. A rank that fails ends the others.", *srun]
    return [
        *again,
        "# The ranks, one per task. A rank that fails ends the others; then all start again from the last checkpoint,",
        f"# at most {job.max_restarts} times (run.max_restarts): not after wrong input, a stop, or numbers gone bad.",
        f"for attempt in $(seq 0 {job.max_restarts}); do",
        '    if [ "$attempt" -gt 0 ]; then goes_on; fi',
        *(f"    {line}" for line in srun),
        f'    if [ "$status" -eq 0 ] || [ "$verdict" = final ] || [ -e "$run_dir/{REQUEUE}" ]; then break; fi',
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
