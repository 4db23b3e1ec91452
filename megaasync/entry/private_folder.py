"""A short folder of this process's own, for sockets, stores and boards of the ranks that it starts.

A socket's path may have 107 bytes, and schedulers make long TMPDIRs. The folder goes when the process ends; after a
kill, the ranks remove it, and else the next process that makes one.
"""

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

from megaasync.config import ConfigError

_LOCK = "alive"
_LONGEST = 48  # bytes: the folder's own name, multiprocessing's folder in it and its socket come to 58 more


def _bases() -> Iterator[Path]:
    """Where such a folder may be, the user's choice first."""
    yield from dict.fromkeys(Path(folder) for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"))


@cache
def _prefix() -> str:
    """Prefix of folders made since this host was started: on a shared disk, locks of another host are not seen."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"megaasync-{hashlib.sha256(f'{socket.gethostname()} {boot}'.encode()).hexdigest()[:6]}-"
    return f"megaasync-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]}-"


def _make(base: Path) -> Path | None:
    """A folder with a lock in it that this process holds, or None where that cannot be."""
    if len(os.fsencode(base)) > _LONGEST:
        return None
    try:
        aside = Path(tempfile.mkdtemp(prefix=".m-", dir=base))
    except OSError:
        return None
    lock = os.open(aside / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # without a lock it must not look like an orphan; after a kill nobody cleans up
        (aside / _LOCK).unlink()
    folder = aside.with_name(_prefix() + aside.name.removeprefix(".m-"))
    aside.rename(folder)  # with the lock held, so that no other process takes it for an orphan
    return folder


def remove_orphans(base: Path) -> None:
    """Remove the folders of processes that were killed: their locks are free."""
    for folder in base.glob(f"{_prefix()}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@cache
def private_folder() -> Path:
    """This process's folder, made at the first call.

    Raises:
        ConfigError: there is no place for it; names TMPDIR.
    """
    for base in _bases():
        remove_orphans(base)
        folder = _make(base)
        if folder is not None:
            # after multiprocessing has removed its own folder in it, whose priority is -100
            Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)
            return folder
    raise ConfigError(
        f"TMPDIR={tempfile.gettempdir()}: no folder for the sockets of the ranks can be made there, whose paths may "
        f"have 107 bytes, nor in /tmp; set TMPDIR to a writable folder of at most {_LONGEST} letters"
    )
