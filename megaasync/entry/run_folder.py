"""The run folder: decided once, made once, never shared by two runs."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from megaasync.checkpoint.folders import look_at, newest, read_meta, remove_leftovers, set_aside_newer
from megaasync.checkpoint.run_lock import lock_folder, wait_for_ranks
from megaasync.checkpoint.settings import check_settings
from megaasync.config import ConfigError, TrainConfig
from megaasync.observe.run_files import read_metrics, write_text


def make_run_folder(wanted: str | None, *, label: str) -> Path:
    """Make and claim a run folder.

    Args:
        wanted: `run.dir`; None takes a new folder under runs/, named by time and label.
        label: readable part of a new folder's name.

    Returns:
        An absolute path to a folder with an empty metrics.jsonl, which is the claim.

    Raises:
        ConfigError: the folder cannot be written, or holds a run already.
    """
    folder = Path(wanted).expanduser() if wanted else new_run_folder(label)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "metrics.jsonl", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        why = "holds a run already (metrics.jsonl)" if folder.is_dir() else "is a file"
        raise ConfigError(f"run.dir={folder}: {why}; choose another folder or remove this one") from None
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder}: cannot be written ({error.strerror}); choose a folder you may write to"
        ) from None
    os.close(descriptor)
    return folder.absolute()


@dataclass(slots=True)
class Claim:
    """A run folder that is ours.

    Attributes:
        folder: absolute.
        resume: complete checkpoint to go on from, or None.
        lock: descriptor that holds the folder.
    """

    folder: Path
    resume: Path | None
    lock: int

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
        found = newest(self.folder / "checkpoints")
        self.resume = self.resume if found is None else found.path
        _go_back(self.folder, 0 if self.resume is None else read_meta(self.resume)["step"])

    def close(self) -> None:
        """Give the folder back; if the run in it never began, the corrected command may use the same folder."""
        release_run_folder(self.folder)
        os.close(self.lock)


def claim_run_folder(config: TrainConfig, plain: Mapping[str, Any], *, label: str) -> Claim:
    """Make a run folder, or find out where the run in it goes on.

    Raises:
        ConfigError: the folder cannot be written, another run works there, it holds a run that is not this one, or the
            checkpoint is not whole.
    """
    wish, wanted = config.checkpoint.resume, config.run.dir
    chosen = None if wish in ("auto", "never") else Path(wish).expanduser().absolute()
    if chosen is not None and not (found := look_at(chosen)).is_complete:
        raise ConfigError(
            f"checkpoint.resume={wish}: {found.problem}; python -m megaasync.checkpoint list FOLDER shows whole ones"
        )
    folder = None if wanted is None else Path(wanted).expanduser().absolute()
    if folder is None or not (folder / "metrics.jsonl").exists():
        folder = make_run_folder(wanted, label=label)
        return Claim(folder, chosen, lock_folder(folder))
    if wish == "never" or not os.access(folder, os.W_OK):
        make_run_folder(wanted, label=label)  # says why not
    lock = lock_folder(folder)
    try:
        own = chosen if chosen is not None and chosen.parent == folder / "checkpoints" else None
        if chosen is not None and own is None and _begun_from(folder) != chosen:
            raise ConfigError(
                f"run.dir={config.run.dir}: holds a run already, and checkpoint.resume={wish} is not of it; choose "
                "another folder"
            )
        remove_leftovers(folder / "checkpoints")
        resume, step = own or where_to_go_on(config, plain, folder), 0
        if resume is not None:  # before anything of the run is touched
            meta = read_meta(resume)
            check_settings(meta, plain, resume, override=config.checkpoint.override)
            step = meta["step"]
        _go_back(folder, step)
    except BaseException:
        os.close(lock)
        raise
    return Claim(folder, resume, lock)


def _go_back(folder: Path, step: int) -> None:
    """Make a run folder what it was after a step; newer checkpoints are set aside."""
    root = folder / "checkpoints"
    remove_leftovers(root)
    set_aside_newer(root, step)
    _forget_after(folder, step)


def _begun_from(folder: Path) -> Path | None:
    """The checkpoint that the run in a folder was begun from; None if it was none."""
    starts = [row for row in read_metrics(folder / "metrics.jsonl") if row.get("kind") == "start"]
    name = starts[0].get("checkpoint") if starts else None
    return None if name is None else Path(name)


def where_to_go_on(config: TrainConfig, plain: Mapping[str, Any], folder: Path) -> Path | None:
    """The newest complete checkpoint of the run in a folder, else what it was begun from; only looks.

    None to begin again a run that was lost before its first checkpoint.

    Raises:
        ConfigError: the folder holds another run, or this one complete.
    """
    found = newest(folder / "checkpoints")
    if found is None:
        first = _begun_from(folder)
        if first is not None and look_at(first).is_complete:
            return first
        if first is not None:
            raise ConfigError(
                f"run.dir={config.run.dir}: the run in it was begun from {first}, which is no longer whole; choose "
                "another folder, and another checkpoint.resume"
            )
        if config.checkpoint.interval is None or not _is_same_run(folder, plain):
            raise ConfigError(
                f"run.dir={config.run.dir}: holds a run already (metrics.jsonl) and no whole checkpoint of it; choose "
                "another folder or remove this one"
            )
        return None
    if found.step >= config.train.steps and _status(folder) == "completed":
        raise ConfigError(
            f"run.dir={config.run.dir}: holds a run already, complete after {found.step} steps; set train.steps above "
            "that to go on, or choose another folder"
        )
    return found.path


def _is_same_run(folder: Path, plain: Mapping[str, Any]) -> bool:
    """Whether the run that was begun here had the same model, data, optimizer and seed."""
    try:
        begun = yaml.safe_load((folder / "config.yaml").read_text())
        groups = all(begun[group] == plain[group] for group in ("model", "data", "optimizer"))
        return groups and begun["train"]["seed"] == plain["train"]["seed"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return False


def _status(folder: Path) -> str | None:
    try:
        return json.loads((folder / "summary.json").read_text()).get("status")
    except (OSError, ValueError, AttributeError):
        return None


def _forget_after(folder: Path, step: int) -> None:
    """Take back what the run wrote after a step: it will write that again."""
    rows = read_metrics(folder / "metrics.jsonl")
    kept = [row for row in rows if row.get("kind") == "start" or row.get("step", 0) <= step]
    write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
    for name in ("summary.json", "report.html", "trace.json"):
        (folder / name).unlink(missing_ok=True)


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


def release_run_folder(folder: Path) -> None:
    """Take the claim back if the run never began, so that the corrected command may use the same folder."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size == 0:
        ours = (*folder.glob(".config.yaml.*"), *folder.glob(".*.lock"))
        for path in (metrics, folder / "config.yaml", *ours):
            path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
