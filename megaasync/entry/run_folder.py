"""The run folder: decided once, made once, never shared by two runs."""

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from megaasync.checkpoint.compatibility import check_settings
from megaasync.checkpoint.paths import checkpoints_in, inspect_checkpoint, latest, mark_of, read_meta, remove_leftovers
from megaasync.checkpoint.run_lock import lock_folder, wait_for_ranks
from megaasync.config import Config, ConfigError
from megaasync.config.identity import first_difference
from megaasync.data.identity import Identity, check_identity
from megaasync.observe.run_files import iterate_metrics, read_metrics


def _existing_folder(wanted: str) -> Path:
    """The folder that `run.dir` names, made if it is not there; an absolute path.

    Raises:
        ConfigError: it cannot be made or written.
    """
    folder = Path(wanted).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"run.dir={wanted}: is a file, or lies in one; choose another folder") from None
    except OSError as error:
        raise ConfigError(
            f"run.dir={wanted}: cannot be written ({error.strerror}); choose a folder you may write to"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir={wanted}: cannot be written (Permission denied); choose a folder you may write to")
    return folder


def _is_used(folder: Path) -> bool:
    """Whether a run has left anything of its own; a claim that came to nothing, by a kill at its start, has not."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or bool(checkpoints_in(folder / "checkpoints"))


@dataclass(slots=True)
class ClaimedFolder:
    """A run folder that is ours.

    Attributes:
        folder: absolute.
        resume: complete checkpoint to go on from, or None.
        lock: descriptor that holds the folder.
        notes: what the user should know about how the run goes on.
        owns_config: config.yaml is this start's own, and goes with a claim that came to nothing.
    """

    folder: Path
    resume: Path | None
    lock: int
    notes: tuple[str, ...] = ()
    owns_config: bool = True

    @property
    def has_begun(self) -> bool:
        """Whether the run has written anything of its own."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_size > 0

    def begin_again(self) -> None:
        """After the ranks have ended: go on from the newest checkpoint, or else from where the run began.

        Raises:
            ConfigError: ranks still work there.
        """
        wait_for_ranks(self.folder)
        if self.resume is not None and self.resume.is_dir() and not has_resumed_from(self.folder, self.resume):
            return  # the checkpoint that was asked for has not been loaded yet
        found = latest(self.folder / "checkpoints")
        self.resume = self.resume if found is None else found.path

    @property
    def step(self) -> int:
        """Steps that are done where the run goes on."""
        return 0 if self.resume is None else read_meta(self.resume)["step"]

    def close(self) -> None:
        """Give the folder back; if the run in it never began, the corrected command may use the same folder."""
        release_run_folder(self.folder, with_config=self.owns_config)
        os.close(self.lock)


def claim_run_folder(config: Config, *, label: str, data: Identity) -> ClaimedFolder:
    """Make a run folder, or find out where the run in it goes on.

    Args:
        config: of the run.
        label: readable part of a new folder's name.
        data: hashes of the run's tokenizer and tokens.

    Raises:
        ConfigError: the folder cannot be written, another run works there, it holds a run that is not this one, or the
            checkpoint is not whole.
    """
    requested = config.checkpoint.resume
    chosen = None if requested in ("auto", "never") else Path(requested).expanduser().absolute()
    if chosen is not None:
        meta = _named_checkpoint(chosen, requested)
        check_settings(meta, config, chosen, data=data)
    folder = new_run_folder(label).absolute() if config.run.dir is None else _existing_folder(config.run.dir)
    lock = lock_folder(folder)
    try:
        if not _is_used(folder):
            (folder / "metrics.jsonl").touch()  # the claim
            return ClaimedFolder(folder, chosen, lock)
        if requested == "never":
            raise ConfigError(
                f"run.dir={config.run.dir}: holds a run already; choose another folder or remove this one"
            )
        root = folder / "checkpoints"
        own = chosen if chosen is not None and chosen.resolve().parent == root.resolve() else None
        if chosen is not None and own is None and not _is_same_place(_origin_checkpoint(folder), chosen):
            raise ConfigError(
                f"run.dir={config.run.dir}: holds a run already, and checkpoint.resume={requested} is not of it; "
                "choose another folder"
            )
        remove_leftovers(root)
        claim = ClaimedFolder(folder, own or find_resume_point(config, folder, data=data), lock)
        if claim.resume is not None:  # before anything of the run is touched
            meta = read_meta(claim.resume)
            check_settings(meta, config, claim.resume, data=data)
            claim.notes = _lost_rows(folder, meta["step"])
            if "data" not in meta and config.data.name == "indexed":
                claim.notes += (f"WARNING: {claim.resume} has no hashes of its tokens, so they cannot be compared",)
    except BaseException:
        os.close(lock)
        raise
    return claim


def _named_checkpoint(path: Path, requested: str) -> dict[str, Any]:
    found = inspect_checkpoint(path)
    if not found.is_complete:
        raise ConfigError(
            f"checkpoint.resume={requested}: {found.problem}; python -m megaasync.checkpoint list FOLDER shows whole "
            "ones"
        )
    return read_meta(path)


def _is_same_place(one: Path | None, other: Path) -> bool:
    return one is not None and one.resolve() == other.resolve()


def _lost_rows(folder: Path, step: int) -> tuple[str, ...]:
    """A line if metrics.jsonl has not all rows up to a checkpoint's step, as when somebody removed it."""
    rows = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row.get("kind") == "train"]
    if not step or (rows and max(rows) >= step):
        return ()
    ends = f"ends at step {max(rows)}" if rows else "has no rows"
    return (
        f"WARNING: {folder / 'metrics.jsonl'} {ends}, but the checkpoint is of step {step}: the rows between are lost; "
        "the run itself goes on exactly",
    )


def _origin_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that the run in a folder was begun from; None if it was none."""
    name = _first_start(folder).get("checkpoint")
    return None if name is None else Path(name)


def has_resumed_from(folder: Path, checkpoint: Path) -> bool:
    """Whether a start of the run in a folder has gone on from a checkpoint."""
    rows = (row for row in iterate_metrics(folder / "metrics.jsonl") if row.get("kind") == "start")
    names = (row.get("checkpoint") for row in rows)
    return any(name is not None and _is_same_place(Path(name), checkpoint) for name in names)


def _first_start(folder: Path) -> dict[str, Any]:
    starts = (row for row in read_metrics(folder / "metrics.jsonl") if row.get("kind") == "start")
    return next(starts, {})


def find_resume_point(config: Config, folder: Path, *, data: Identity | None = None) -> Path | None:
    """The newest complete checkpoint of the run in a folder, else what it was begun from; only looks.

    None to begin again a run that was lost before its first checkpoint.

    Args:
        config: of the run.
        folder: the run folder.
        data: hashes of the run's tokenizer and tokens; None where nobody has computed them.

    Raises:
        ConfigError: the folder holds another run, or this one complete.
    """
    found = latest(folder / "checkpoints")
    if found is None:
        _check_same_run(config, folder, data=data)
        first = _origin_checkpoint(folder)
        if first is None:
            return None
        if inspect_checkpoint(first).is_complete:
            if _first_start(folder).get("checkpoint_crc32") in (None, mark_of(first)):
                return first
            raise ConfigError(
                f"run.dir={config.run.dir}: the run in it was begun from {first}, where another checkpoint is by now; "
                "choose another folder, and another checkpoint.resume"
            )
        raise ConfigError(
            f"run.dir={config.run.dir}: the run in it was begun from {first}, which is no longer whole; choose "
            "another folder, and another checkpoint.resume"
        )
    if found.step >= config.train.steps and _status(folder) == "completed":
        raise ConfigError(
            f"run.dir={config.run.dir}: holds a run already, complete after {found.step} steps; set train.steps above "
            "that to go on, or choose another folder"
        )
    return found.path


def _check_same_run(config: Config, folder: Path, *, data: Identity | None = None) -> None:
    """A run that was lost before its first checkpoint starts over only with the same config: its rows are discarded.

    Raises:
        ConfigError: something that decides its numbers differs, or cannot be known.
    """
    here, rest = f"run.dir={config.run.dir}: holds a run already", "choose another folder or remove this one"
    if config.checkpoint.interval is None:
        raise ConfigError(f"{here}, and checkpoint.interval=null makes no checkpoint to go on from; {rest}")
    try:
        begun = yaml.safe_load((folder / "config.yaml").read_text())
        difference = first_difference(begun, config)
    except (OSError, yaml.YAMLError, AttributeError, TypeError):
        raise ConfigError(f"{here} (metrics.jsonl), but no config.yaml tells which; {rest}") from None
    if difference is not None:
        raise ConfigError(f"{here}, another one, and no whole checkpoint of it ({difference}); {rest}")
    if data is not None:
        start, override = _first_start(folder), config.checkpoint.override
        is_known = config.data.name == "synthetic"  # which is made from the seed
        check_identity(start.get("data"), data, where=f"the run in {folder}", override=override, is_known=is_known)


def _status(folder: Path) -> str | None:
    try:
        return json.loads((folder / "summary.json").read_text()).get("status")
    except (OSError, ValueError, AttributeError):
        return None


def new_run_folder(label: str) -> Path:
    """A folder that nobody else has: made atomically, numbered if the second is taken."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        folder = Path("runs") / (f"{stamp}-{label}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"run.dir={folder}: cannot be made ({error.strerror}); set run.dir to a folder you may write to"
            ) from None
    raise ConfigError("run.dir: no free name under runs/; set run.dir")


def release_run_folder(folder: Path, *, with_config: bool = True) -> None:
    """Take the claim back if the run never began, so that the corrected command may use the same folder.

    Args:
        folder: of the run.
        with_config: remove config.yaml too; not the one that a launch has planned, which a job starts from again.
    """
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size == 0:
        ours = (*folder.glob(".config.yaml.*"), *folder.glob(".*.lock"))
        config = [folder / "config.yaml"] if with_config else []
        for path in (metrics, *config, folder / "tokenizer.model", *ours):
            path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
