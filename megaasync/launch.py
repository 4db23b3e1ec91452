"""The whole cluster job from one command: python -m megaasync.launch cluster=slurm [overrides] [-m]."""

import importlib
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from megaasync.checkpoint.compatibility import check_settings
from megaasync.checkpoint.paths import read_meta
from megaasync.cluster.docker import docker_command
from megaasync.cluster.record import LAUNCH_RECORD, code_hash, environment_record
from megaasync.cluster.script import Job, JobRun, render_script
from megaasync.cluster.submit import check_no_job, note_job, submit
from megaasync.config import Config, ConfigError, read, to_plain, validate
from megaasync.config.identity import config_hash
from megaasync.config.schema import DockerCluster, SlurmCluster
from megaasync.config.secrets import redacted
from megaasync.data import DataError
from megaasync.distributed.environment import variables
from megaasync.entry.file_errors import explain_file_error
from megaasync.entry.hydra_app import (
    CONFIG_ERROR_STATUS,
    INTERRUPTED_STATUS,
    current_overrides,
    fail,
    run_app,
    sweep_number,
)
from megaasync.entry.launch_checks import check_files, needed_folders
from megaasync.entry.run_config import check_secrets, sha256_of
from megaasync.entry.run_folder import find_resume_point, new_run_folder
from megaasync.observe.run_files import write_json, write_text
from megaasync.pretrain import resolve_data, with_folder


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One run that was asked for, checked.

    Attributes:
        config: validated.
        overrides: as typed, without run.dir; written down for people.
    """

    config: Config
    overrides: tuple[str, ...]


def _check(plain: dict[str, Any]) -> _Wanted:
    """Read and validate one config of the command line.

    Raises:
        ConfigError: it is wrong, or not for a cluster.
    """
    config = validate(resolve_data(read(Config, plain), None))
    if not isinstance(config.cluster, SlurmCluster | DockerCluster):
        raise ConfigError(
            f"cluster={config.cluster.name}: nothing to set up; set cluster=slurm or cluster=docker, or start it here "
            "with python -m megaasync.pretrain"
        )
    check_secrets(config)
    if not config.dry_run and config.cluster.check_files:
        check_files(config)
    own = ("run.dir=", "+run.dir=", "cluster.submit=")
    return _Wanted(config, tuple(override for override in current_overrides() if not override.startswith(own)))


def _label(config: Config) -> str:
    return f"{config.model.name}-{config.optimizer.name}-{config.schedule.name}"


def _write_run(wanted: _Wanted, folder: Path, record: dict[str, Any], plan: dict[str, Any]) -> None:
    """The run folder's first files.

    Raises:
        ConfigError: it holds a run that is complete, or another one, or a job that has not ended.
    """
    check_no_job(folder)
    if (folder / "metrics.jsonl").exists():
        found = find_resume_point(wanted.config, folder)
        if found is not None:
            check_settings(read_meta(found), wanted.config, found)
        print(f"{folder} holds this run already; it goes on from {found or 'its beginning'}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = with_folder(wanted.config, folder)
        content = yaml.safe_dump(to_plain(config), sort_keys=False)
        write_text(folder / "config.yaml", content)
        write_text(folder / "overrides.txt", "".join(f"{override}\n" for override in wanted.overrides))
        own = {
            "config_hash": config_hash(config),
            "config_sha256": sha256_of(content.encode()),
            "total_parameters": plan["total_parameters"],
        }
        write_json(folder / LAUNCH_RECORD, record | own)
        write_json(folder / "plan.json", plan)
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder}: cannot be written ({error.strerror}); choose a folder that all nodes see"
        ) from None


def _launch(runs: list[_Wanted], *, requested: str | None) -> None:
    """Write the job of all runs, and start it."""
    first = runs[0].config
    planner = importlib.import_module("megaasync.plan.plan")
    plan_text = importlib.import_module("megaasync.plan.text")
    if first.dry_run:
        print(plan_text.summarise_plan(planner.make_plan(first)))
        return
    others = [run for run in runs[1:] if run.config.cluster != first.cluster]
    if others:
        raise ConfigError("cluster: the runs of a sweep become one job array, so all need the same cluster.* keys")
    base = Path(requested).expanduser().absolute() if requested else new_run_folder(_label(first)).absolute()
    folders = [base] if len(runs) == 1 else [base / str(number) for number in range(len(runs))]
    package = Path(__file__).parent
    record = environment_record(package, command=redacted(shlex.join(sys.argv), variables())) | {
        "code_hash": code_hash(package)
    }
    plans = [planner.make_plan(run.config) for run in runs]
    print(plan_text.summarise_plan(plans[0]))
    for number, plan in enumerate(plans[1:], start=1):
        for warning in plan["warnings"]:
            print(f"WARNING    run {number}: {warning}")
    for wanted, folder, plan in zip(runs, folders, plans, strict=True):
        _write_run(wanted, folder, record, plan)
    pieces = tuple(JobRun(folder) for folder in folders)
    needed = tuple(dict.fromkeys(path for run in runs for path in needed_folders(run.config)))
    if isinstance(first.cluster, DockerCluster):
        _start_docker(first.cluster, pieces, needed)
        return
    _start_slurm(first, first.cluster, pieces, base, needed)


def _start_slurm(
    config: Config, cluster: SlurmCluster, runs: tuple[JobRun, ...], base: Path, needed: tuple[Path, ...]
) -> None:
    python = cluster.python or ("python" if cluster.container_image else shlex.quote(sys.executable))
    job = Job(
        name=re.sub(r"[^\w.-]", "-", base.name) if config.run.dir else f"megaasync-{_label(config)}",
        cluster=cluster,
        runs=runs,
        folder=base,
        directory=Path.cwd(),
        python=python,
        data_folders=needed,
        max_restarts=config.run.max_restarts,
        made=f"Written by python -m megaasync.launch on {datetime.now():%Y-%m-%d %H:%M}.",
    )
    script = base / "job.sbatch"
    write_text(script, render_script(job))
    print(f"script: {script}")
    if not cluster.submit:
        print(f"not submitted (cluster.submit=false); submit it with: sbatch {shlex.quote(str(script))}")
        return
    number = submit(script)
    for run in runs:
        note_job(run.folder, number)
    log = f"slurm-{number}{'_*' if job.is_array else ''}.log"
    print(
        f"job {number}\n"
        f"  its state:   squeue -j {number}\n"
        f"  its log:     tail -F {shlex.quote(str(base))}/{log}\n"
        f"  its numbers: {', '.join(str(run.folder / 'metrics.jsonl') for run in runs[:3])}\n"
        f"  save, end and queue it again: scancel --signal=USR1 {number}\n"
        f"  save and end it for good:     scancel --signal=TERM {number}"
    )


def _start_docker(cluster: DockerCluster, runs: tuple[JobRun, ...], needed: tuple[Path, ...]) -> None:
    for run in runs:
        command = docker_command(cluster, run, directory=Path.cwd(), data_folders=needed)
        script = run.folder / "job.sh"
        write_text(script, f"#!/bin/sh\n# Written by python -m megaasync.launch.\nexec {shlex.join(command)}\n")
        print(f"script: {script}")
        if not cluster.submit:
            print(f"not started (cluster.submit=false); start it with: sh {shlex.quote(str(script))}")
            continue
        if status := _wait_for(command):
            raise SystemExit(status)


def _wait_for(command: list[str]) -> int:
    """Run a command; a signal goes on to it, and it ends in its own time. Its status."""
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise ConfigError(
            f"cluster=docker: docker cannot be started on this host ({error.strerror}); set cluster.submit=false to "
            "only write the command"
        ) from None
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)


def main() -> None:
    """Entry point."""
    runs: list[_Wanted] = []
    requests: list[str | None] = []

    def collect(plain: dict[str, Any]) -> None:
        requested = plain["run"]["dir"]
        requests.append(requested if requested is None or sweep_number() is None else str(Path(requested).parent))
        try:
            runs.append(_check(plain))
        except (ConfigError, DataError) as error:
            fail(str(error), status=CONFIG_ERROR_STATUS)

    if any(argument.startswith("hydra/launcher=") for argument in sys.argv):
        fail("hydra/launcher: the runs of a launch become one job array; leave it out", status=CONFIG_ERROR_STATUS)
    run_app(collect, name="launch", collects=True)
    if not runs:  # --cfg job and the like have answered
        return
    try:
        _launch(runs, requested=requests[0])
    except ConfigError as error:
        fail(str(error), status=CONFIG_ERROR_STATUS)
    except OSError as error:
        fail(explain_file_error(error), status=CONFIG_ERROR_STATUS)
    except KeyboardInterrupt:
        fail("interrupted", status=INTERRUPTED_STATUS)


if __name__ == "__main__":
    importlib.import_module("megaasync.launch").main()
