"""The run folder: decided once, made once, never shared by two runs."""

import os
from datetime import datetime
from pathlib import Path

from megaasync.config import ConfigError


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
    folder = Path(wanted).expanduser() if wanted else _new_folder(label)
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


def _new_folder(label: str) -> Path:
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
        for path in (metrics, folder / "config.yaml", *folder.glob(".config.yaml.*")):
            path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
