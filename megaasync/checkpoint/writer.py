"""Saves beside the training: the pipeline waits for one copy of the local state, and for a save that still runs.

A save that fails leaves the older checkpoints, is told of, and the training goes on.
"""

import importlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import distributed as dist

from megaasync.checkpoint import paths
from megaasync.checkpoint.stage_state import ShardedStateDict, bytes_of, to_host
from megaasync.distributed.agreement import all_gather_object
from megaasync.observe.run_files import write_json

_ROOM = 1.05  # of the bytes to be written, that must be free


class SaveError(RuntimeError):
    """A checkpoint could not be written, on some rank."""


def _words(error: BaseException) -> str:
    """The innermost reason of a failure, in one line."""
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint: (exception, traceback) by rank
    if failures:
        rank, (cause, _) = sorted(failures.items())[0]
        return f"rank {rank}: {_words(cause)}"
    if "inline_container" in str(error):  # torch's words for a write that came to less than it should
        return "a file could not be written whole; is the disk full, or a quota or file size limit reached?"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


class AsyncCheckpointWriter:
    """Writes checkpoints of one run; every rank has one and they act together.

    Attributes:
        root: folder of the checkpoints.
        last_step: of the last save begun, or of the checkpoint resumed from; -1 before.
        longest: seconds that the longest save took so far.
        saved_step: of the last save that is durable, or of the checkpoint resumed from; -1 before.
        problem: why the last save failed; None if it did not.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep: int,
        is_async: bool,
        group: dist.ProcessGroup | None,
        notify: Callable[[str], None],
    ) -> None:
        """A writer.

        Args:
            root: folder of the checkpoints, the same on every rank.
            keep: newest ones kept.
            is_async: write in the background.
            group: all ranks, over gloo, for nothing else; None for a single rank.
            notify: tells the user, on rank 0.
        """
        # torch.distributed.checkpoint takes a second to import: here, in the main thread, of runs that save
        importlib.import_module("megaasync.checkpoint.dcp_io")
        self.root, self._keep, self._is_async, self._group, self._notify = root, keep, is_async, group, notify
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None  # of the thread, that only this rank knows of
        self.last_step, self.longest = -1, 0.0
        self.saved_step, self.problem = -1, None

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)

    def save(self, step: int, entries: ShardedStateDict, meta: Mapping[str, Any], *, own: Mapping[str, Any]) -> None:
        """Begin a save; waits for the one before.

        Raises:
            Exception: this rank's save before met a fault that the others do not know of.

        Args:
            step: batches done.
            entries: this rank's, views; copied before this returns.
            meta: what the checkpoint says about itself, the same on all ranks.
            own: what this rank alone knows, added to `meta["ranks"]`.
        """
        self.wait()
        self.last_step = step
        mine = to_host(entries)
        if not self._is_async:
            self._save(step, mine, dict(meta), dict(own))
            self.raise_fault()
            return
        self._thread = threading.Thread(
            target=self._save, args=(step, mine, dict(meta), dict(own)), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the save under way, if there is one, is durable or has failed.

        Raises:
            Exception: as `raise_fault`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_fault()

    def raise_fault(self) -> None:
        """End this rank, and so the run, if its thread met a fault: the others would wait for it in the next save.

        Raises:
            Exception: the fault. A save that failed for all ranks, as on a full disk, is none.
        """
        if self._fault is not None:
            raise self._fault

    def _save(self, step: int, entries: ShardedStateDict, meta: dict[str, Any], own: dict[str, Any]) -> None:
        from megaasync.checkpoint.dcp_io import CheckpointException, write  # there since __init__

        began = time.monotonic()
        tmp_dir = paths.tmp_dir_of(self.root, step)
        try:
            self._prepare(tmp_dir, bytes_of(entries))
            write(entries, tmp_dir, group=self._group)
            self._finish(tmp_dir, step, meta, own)
            self.saved_step, self.problem = step, None
        except (SaveError, CheckpointException, OSError) as error:
            self.problem = _words(error)
            if isinstance(error, OSError) and self._group is not None:
                self._fault = error  # here alone; what all ranks know of is one of the others
            elif self._rank == 0:
                shutil.rmtree(tmp_dir, ignore_errors=True)
                kept = paths.latest(self.root)
                newest = f"the newest checkpoint is {kept.path}" if kept else "there is no checkpoint yet"
                self._notify(f"checkpoint at step {step} failed: {_words(error)}; training goes on, {newest}")
        except BaseException as error:
            self._fault = error
        self.longest = max(self.longest, time.monotonic() - began)

    def _prepare(self, tmp_dir: Path, num_bytes: int) -> None:
        """A folder with room for all ranks' bytes."""
        total = sum(all_gather_object(num_bytes, self._group))
        problem = None
        if self._rank == 0:
            try:
                shutil.rmtree(tmp_dir, ignore_errors=True)
                self.root.mkdir(exist_ok=True)  # without its parents: a run folder that is gone stays gone
                tmp_dir.mkdir()
                free = shutil.disk_usage(tmp_dir).free
                if free < total * _ROOM:
                    problem = (
                        f"{self.root}: needs {total / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free; make "
                        "room, or set checkpoint.keep lower"
                    )
            except OSError as error:
                problem = _words(error)
        self._agree(problem)

    def _finish(self, tmp_dir: Path, step: int, meta: dict[str, Any], own: dict[str, Any]) -> None:
        """Checksums, meta data, name and mark; then older checkpoints may go."""
        problem, sums = None, {}
        try:
            mine = f"__{self._rank}_"
            sums = {path.name: paths.checksum(path) for path in tmp_dir.iterdir() if path.name.startswith(mine)}
        except OSError as error:
            problem = _words(error)
        parts = all_gather_object((sums, own, problem), self._group)
        problem = next((part for _, _, part in parts if part), None)
        if self._rank == 0 and problem is None:
            try:
                meta["ranks"] = [part for _, part, _ in parts]
                write_json(tmp_dir / paths.META, meta)
                all_sums = {name: crc for found, _, _ in parts for name, crc in found.items()}
                for name in (paths.META, paths.TENSORS, paths.PICKLED):
                    all_sums[name] = paths.checksum(tmp_dir / name)
                paths.finish(tmp_dir, self.root / paths.folder_name(step), all_sums)
            except OSError as error:
                problem = _words(error)
        self._agree(problem)
        if self._rank == 0:  # the save is durable: older ones that cannot be removed do not make it a failure
            for path in paths.remove_older(self.root, keep=self._keep):
                self._notify(
                    f"WARNING: the older checkpoint {path} could not be removed; remove it by hand to make room"
                )

    def _agree(self, problem: str | None) -> None:
        """All ranks hear of rank 0's problem.

        Raises:
            SaveError: on every rank, if there is one.
        """
        problem = all_gather_object(problem, self._group)[0]
        if problem:
            raise SaveError(problem)
