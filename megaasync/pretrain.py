"""One pretraining run from the command line: python -m megaasync.pretrain [group=choice] [key=value]."""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

from megaasync.cluster.script import ENDED
from megaasync.config import Config, ConfigError, phases_of, read, to_plain, validate
from megaasync.config.parallel_dims import AXES
from megaasync.data import DataError
from megaasync.distributed import DeviceError, TransportError
from megaasync.distributed.environment import RankEnvironment, launched_environment
from megaasync.distributed.interrupts import Stop, note_interrupts
from megaasync.entry.console import fail_if_unread, tolerate_console
from megaasync.entry.file_errors import explain_file_error
from megaasync.entry.hydra_app import CONFIG_ERROR_STATUS, INTERRUPTED_STATUS, RunStopped, fail, run_app
from megaasync.entry.rank import run_rank
from megaasync.entry.run_config import check_secrets, path_in, read_run_config
from megaasync.entry.run_folder import ClaimedFolder, claim_run_folder
from megaasync.entry.spawn import Interrupted, RankFailed, spawn_ranks
from megaasync.observe.run_files import copy_whole, read_metrics, write_json, write_text
from megaasync.pipeline import TrainingError
from megaasync.train.rank_job import RankJob

_LONGEST_PAUSE = 60.0  # seconds before a restart


def resolve_data(config: Config, environment: RankEnvironment | None) -> Config:
    """Make `parallel.data=auto` the number of ranks that the other axes leave."""
    parallel, counts = config.parallel, (config.cluster.nodes, config.cluster.ranks_per_node or 1)
    if parallel.data != "auto" or min(parallel.tensor, parallel.expert, parallel.pipeline, *counts) < 1:
        return config  # the rules will say what is wrong
    others, cluster = replace(config.parallel_dims, data=1).world_size, config.cluster
    if environment is not None:
        launched, where = environment.world_size, f"the WORLD_SIZE={environment.world_size} that was launched"
    elif cluster.ranks_per_node is not None:
        launched = cluster.nodes * cluster.ranks_per_node
        where = f"the {launched} ranks of cluster.nodes={cluster.nodes} x {cluster.ranks_per_node} per node"
    else:
        launched, where = others, ""
    if launched % others:
        raise ConfigError(
            f"parallel.data=auto: pipeline x expert x tensor = {others} does not divide {where}; take a multiple of "
            f"{others} or change parallel.pipeline, parallel.expert or parallel.tensor"
        )
    return replace(config, parallel=replace(config.parallel, data=launched // others))


def with_folder(config: Config, folder: Path) -> Config:
    """The config with its run folder."""
    return replace(config, run=replace(config.run, dir=str(folder)))


def _check_place(config: Config, environment: RankEnvironment | None, *, is_from_folder: bool) -> None:
    """Training may begin here: on the cluster that was asked for, with as many ranks as the layout has.

    Raises:
        ConfigError: it may not.
    """
    is_in_container = is_from_folder and config.cluster.name == "docker"
    if config.cluster.name != "local" and environment is None and not is_in_container:
        raise ConfigError(
            f"cluster={config.cluster.name}: started bare, this host is not that cluster; set cluster=local, add "
            "dry_run=true for a plan, or start it with srun or torchrun on the cluster"
        )
    if environment is not None and environment.world_size != config.world_size:
        layout, launched = config.parallel_dims, environment.world_size
        others = replace(layout, data=1).world_size
        remedy = f"parallel.data={launched // others}" if launched % others == 0 else "other degrees"
        raise ConfigError(
            f"parallel.data={layout.data}: tensor({layout.tensor}) x expert({layout.expert}) x "
            f"pipeline({layout.pipeline}) x data({layout.data}) = {layout.world_size} ranks, but WORLD_SIZE={launched} "
            f"were launched; set {remedy} or launch {layout.world_size}"
        )


def _print_plan(config: Config) -> None:
    """Print the plan and write it as plan.json, into the run folder if the config names one."""
    planner = importlib.import_module("megaasync.plan.plan")
    plan = planner.make_plan(config)
    print(importlib.import_module("megaasync.plan.text").summarise_plan(plan))
    folder = Path(config.run.dir).expanduser() if config.run.dir else Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plan.json", plan)
    except OSError as error:  # the plan is on the screen
        print(f"plan.json was not written: {explain_file_error(error)}")
        return
    print(f"plan: {folder / 'plan.json'}")
    fail_if_unread()


def _prepare(config: Config, *, is_first: bool, writes_config: bool) -> tuple[Any, ClaimedFolder | None]:
    """Data and run folder, on the rank or launcher that makes them."""
    prepare = importlib.import_module("megaasync.data.prepare")
    notify = (lambda line: print(line, flush=True)) if is_first else (lambda line: None)
    prepared = prepare.prepare_data(config.data, vocab_size=config.model.vocab_size, notify=notify, identify=is_first)
    if not is_first:
        return prepared, None
    label = f"{config.model.name}-{config.optimizer.name}-{config.schedule.name}"
    claim = claim_run_folder(config, label=label, data=prepared.identity)
    claim.owns_config = writes_config
    for note in claim.notes:
        notify(note)
    try:
        if writes_config:
            _write_config(claim, yaml.safe_dump(to_plain(with_folder(config, claim.folder)), sort_keys=False))
        if prepared.tokenizer is not None:
            copy_whole(Path(prepared.tokenizer), claim.folder / "tokenizer.model")
    except BaseException:
        claim.close()
        raise
    return prepared, claim


def _write_config(claim: ClaimedFolder, content: str) -> None:
    """Write config.yaml; that of the steps before, if it was another, stays beside it."""
    path = claim.folder / "config.yaml"
    if claim.step and path.exists() and path.read_text() != content:
        path.rename(claim.folder / f"config.until_step_{claim.step:08d}.yaml")
    write_text(path, content)


def _write_summary(folder: Path, **facts: str) -> None:
    """The summary of a run that could not write its own, from what metrics.jsonl tells."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row.get("kind") == "train"]
    last = rows[-1] if rows else {"step": 0, "tokens": 0, "loss": None}
    so_far = {"steps": last["step"], "tokens": last["tokens"], "train_loss": last["loss"]}
    written: dict[str, Any] = {}  # by rank 0, which knows more
    with suppress(OSError, ValueError):
        written = json.loads((folder / "summary.json").read_text())
    with suppress(OSError):  # a full disk may be why
        write_json(folder / "summary.json", {**so_far, **written, **facts})


class _EndedItself(Interrupted):
    """The run has ended early without a signal to this process."""


def _write_end_status(folder: Path, status: int, *, retryable: bool) -> bool:
    """Write a rank's status down for the batch script; True on the first rank of the job that does."""
    try:
        with (folder / ENDED).open("x") as file:
            file.write(f"{status} {'again' if retryable else 'final'}\n")
    except FileExistsError:
        return False
    except OSError:
        return True  # nobody can
    return True


def _end_rank(
    message: str, status: int, job_folder: Path | None, claim: ClaimedFolder | None, *, retryable: bool
) -> None:
    """End one rank of a group at once: on the way out of Python its group might hang or abort when a peer is gone.

    srun tells the highest status of its tasks, and ends the slower ones; so the first rank of a job that ends badly
    writes its own status down for the batch script.

    Args:
        message: for the user; empty for nothing.
        status: of the process.
        job_folder: run folder of a SLURM job; None outside of one.
        claim: on the run folder, if this rank has one.
        retryable: another try may.
    """
    if message:
        prefix = "" if status == INTERRUPTED_STATUS else "error: "  # a planned end is none
        print(f"{prefix}{message}", file=sys.stderr)
    if job_folder is not None:
        _write_end_status(job_folder, status, retryable=retryable)
    if claim is not None:
        claim.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _job_folder(plain: Mapping[str, Any], claim: ClaimedFolder | None) -> Path | None:
    """The run folder of a SLURM job, from a config that may be wrong; None outside of one."""
    run, cluster = plain.get("run"), plain.get("cluster")
    if not isinstance(run, dict) or not isinstance(cluster, dict) or cluster.get("name") != "slurm":
        return None
    if claim is not None:
        return claim.folder
    return Path(run["dir"]) if run.get("dir") else None


def _needed_by_ranks(config: Config, resume: Path | None) -> list[str]:
    """Modules that only some runs need and that take a second to import: once is enough for all ranks of a host.

    In a sweep the first run's hold, since they share a fork server; a rank imports what is missing by itself.
    """
    saves = config.checkpoint.interval is not None or resume is not None
    has_stages = phases_of(config)[0].schedule.num_stages > 1
    # torch imports the second one in the first backward that starts from a given gradient
    return ["megaasync.checkpoint.dcp_io"] * saves + ["torch.fx.experimental.symbolic_shapes"] * has_stages


def _run_here(config: Config, prepared: Any, claim: ClaimedFolder, *, began: float) -> None:
    """Run on ranks of this host, and again from the last checkpoint as often as the config says.

    Restarts are counted from the last one that had a newer checkpoint to go on from: a run of a month may fail more
    often than one that fails at once each time. Pauses double, since what fails at once often needs time to recover.

    Raises:
        RankFailed, Interrupted: as `spawn_ranks`.
    """
    restart = 0
    while True:
        before = claim.step
        try:
            statuses = spawn_ranks(
                run_rank,
                (RankJob(config, prepared, claim.folder, claim.resume, began),),
                world_size=config.world_size,
                names=_rank_names(config),
                hang_seconds=config.parallel.timeout_seconds,
                preload=_needed_by_ranks(config, claim.resume),
            )
        except RankFailed as error:
            if not error.is_retryable or not config.run.max_restarts:
                raise
            claim.begin_again()
            restart = 1 if claim.step > before else restart + 1
            if restart > config.run.max_restarts:
                raise
            print(f"{error.details}\n{error}", file=sys.stderr, flush=True)
            pause = min(2.0 ** (restart - 1), _LONGEST_PAUSE)
            where = claim.resume or "the beginning, for lack of a checkpoint"
            print(
                f"restart {restart} of {config.run.max_restarts}, from {where}, in {pause:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(pause)
            continue
        if "interrupted" in statuses:  # by its time limit, or a signal went to a rank and not to this process
            raise _EndedItself("interrupted")
        return


def pretrain(
    plain: Mapping[str, Any],
    *,
    is_from_folder: bool = False,
    on_folder: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Run one config: checked first, then on as many ranks as the layout needs.

    Args:
        plain: the config as plain dicts, as Hydra or a file gives it.
        is_from_folder: it is the config.yaml of its run folder, which stays as it is.
        on_folder: is called with the run folder as soon as it is claimed.

    Raises:
        SystemExit: 2 for the user's mistakes, 1 for a failed rank, 130 for an interrupt.
    """
    environment, claim, began = None, None, perf_counter()

    def end(message: str, status: int, *, retryable: bool = False) -> None:
        """Print it and exit, with a note for the batch script on whether another try may go well."""
        if environment is None:
            fail(message, status=status)
        _end_rank(message, status, _job_folder(plain, claim), claim, retryable=retryable)

    try:
        environment = launched_environment()
        config = validate(resolve_data(read(Config, plain), environment))
        if config.dry_run:
            _print_plan(config)
            return
        _check_place(config, environment, is_from_folder=is_from_folder)
        is_first = environment is None or environment.rank == 0
        prepared, claim = _prepare(config, is_first=is_first, writes_config=not is_from_folder)
        if claim is not None:
            config = with_folder(config, claim.folder)
            on_folder(claim.folder)
        if environment is None:
            _run_here(config, prepared, claim, began=began)
        else:
            folder, resume = (None, None) if claim is None else (claim.folder, claim.resume)
            if run_rank(environment, RankJob(config, prepared, folder, resume, began)) == "interrupted":
                raise Interrupted("interrupted")
    except (ConfigError, DataError) as error:
        if plain.get("debug") is True:
            traceback.print_exc()
        # every rank reads the same config, and rank 0 speaks for all; a device is a rank's own
        is_said = isinstance(error, ConfigError) and not isinstance(error, DeviceError)
        is_silent = is_said and environment is not None and environment.rank > 0
        end("" if is_silent else str(error), CONFIG_ERROR_STATUS)
    except TrainingError as error:  # of this process's own rank
        end(str(error), 1)
    except TransportError as error:
        end(str(error), 1, retryable=True)
    except OSError as error:
        end(explain_file_error(error), CONFIG_ERROR_STATUS)
    except RankFailed as error:
        if claim.has_begun:
            _write_summary(claim.folder, status="failed", message=str(error))
        if error.details:
            print(error.details, file=sys.stderr)
        end(str(error), CONFIG_ERROR_STATUS if error.is_user_error else 1)
    except (Interrupted, KeyboardInterrupt) as error:
        begun = claim is not None and claim.has_begun
        if begun and not (claim.folder / "summary.json").exists():
            _write_summary(claim.folder, status="interrupted")
        try:
            end("interrupted" + (f"; the run folder is {claim.folder}" if begun else ""), INTERRUPTED_STATUS)
        except SystemExit as leave:
            raise RunStopped(leave.code) if isinstance(error, _EndedItself) else leave from None
    except Exception as error:
        if environment is None:
            raise
        traceback.print_exc()
        end(f"rank {environment.rank}: {type(error).__name__}: {error}", 1, retryable=True)
    finally:
        if claim is not None:
            claim.close()


def _rank_names(config: Config) -> list[str]:
    """Ranks with their pipeline stages and, of axes with several ranks, where they stand; for messages."""
    schedule, layout = phases_of(config)[0].schedule, config.parallel_dims
    names = []
    for rank in range(layout.world_size):
        stages = ", ".join(map(str, schedule.stages_of(layout.coordinate(rank, "pipeline"))))
        others = [f", {axis} {layout.coordinate(rank, axis)}" for axis in AXES[1:] if getattr(layout, axis) > 1]
        names.append(f"rank {rank} (stage {stages}{''.join(others)})")
    return names


def _pretrain_from_file(path: Path) -> None:
    """A run from the config.yaml of its folder, as jobs start it.

    Raises:
        SystemExit: as `pretrain`.
    """
    tolerate_console()

    interrupts = note_interrupts(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    try:
        environment = launched_environment()
    except ConfigError as error:
        fail(str(error), status=CONFIG_ERROR_STATUS)
    try:
        plain = read_run_config(path, sys.argv[1:])
        check_secrets(read(Config, plain))
        if interrupts.numbers:
            raise Stop
    except ConfigError as error:
        if environment is None:
            fail(str(error), status=CONFIG_ERROR_STATUS)
        # every rank reads the same file, and srun ends the slower ones: the first one speaks
        is_first = _write_end_status(path.parent, CONFIG_ERROR_STATUS, retryable=False)
        _end_rank(str(error) if is_first else "", CONFIG_ERROR_STATUS, None, None, retryable=False)
    except Stop:
        fail("interrupted", status=INTERRUPTED_STATUS)
    pretrain(plain, is_from_folder=True)


def main() -> None:
    """Entry point."""
    try:
        path = path_in(sys.argv[1:])
    except ConfigError as error:
        fail(str(error), status=CONFIG_ERROR_STATUS)
    if path is not None:
        _pretrain_from_file(path)
    else:
        run_app(pretrain, reports_folder=True)


if __name__ == "__main__":
    importlib.import_module("megaasync.pretrain").main()
