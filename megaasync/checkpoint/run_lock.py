"""Who works in a run folder: the launcher holds one lock, every living rank another, so that no two runs write there.

A launcher that is killed may leave ranks alive for a moment; a second start waits for them.
"""

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from megaasync.config import ConfigError

WAIT_SECONDS = 30.0
_LAUNCHER, _RANKS = ".launcher.lock", ".ranks.lock"


def _wait_for(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        except OSError:  # a file system without locks: unguarded, as without this file
            return True


def _open(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR, 0o666)


def lock_folder(folder: Path, *, wait: float = WAIT_SECONDS) -> int:
    """Hold the folder until this process ends; waits for another run's end.

    Returns:
        A descriptor: closing it gives the folder back.

    Raises:
        ConfigError: another run works there; says which.
    """
    deadline = time.monotonic() + wait
    launcher = _open(folder / _LAUNCHER)
    if not _wait_for(launcher, deadline):
        holder = os.pread(launcher, 1000, 0).decode(errors="replace").strip() or "an unknown process"
        os.close(launcher)
        raise ConfigError(f"run.dir={folder}: {holder} works there; wait for its end or choose another folder")
    try:
        wait_for_ranks(folder, wait=deadline - time.monotonic())
    except ConfigError:
        os.close(launcher)
        raise
    os.ftruncate(launcher, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(launcher, f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode(), 0)
    return launcher


def wait_for_ranks(folder: Path, *, wait: float = WAIT_SECONDS) -> None:
    """Until no rank works in the folder any more.

    Raises:
        ConfigError: one still does.
    """
    ranks = _open(folder / _RANKS)
    is_free = _wait_for(ranks, time.monotonic() + wait)
    os.close(ranks)
    if not is_free:
        raise ConfigError(
            f"run.dir={folder}: ranks of a run that has ended still work there; end them or choose another folder"
        )


def join_folder(folder: Path) -> int:
    """A rank works in the folder from now until it ends."""
    descriptor = _open(folder / _RANKS)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor
