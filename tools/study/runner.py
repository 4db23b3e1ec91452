"""Runs of a study, several at once, each the product's own command in a folder of its own; finished ones are kept."""

import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import megaasync
from megaasync.cluster.record import code_hash
from megaasync.observe.run_files import read_metrics, write_json

from .design import Run

_DONE = "study.json"


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to.

    Attributes:
        status: completed, or failed for one whose numbers became infinite.
        val_loss: of the settled z; inf if it failed.
        val_loss_x: of the weights the last forwards ran at, if they are others.
        seconds: wall-clock, start included.
        code: hash of the code that made it; empty if that was not written down.
    """

    run: Run
    status: str
    val_loss: float
    val_loss_x: float | None
    steps: int
    tokens: int
    seconds: float
    folder: Path
    code: str

    @property
    def row(self) -> dict[str, Any]:
        """For results.csv."""
        run = {key: value for key, value in asdict(self.run).items() if key != "overrides"}
        rest = ("status", "val_loss", "val_loss_x", "steps", "tokens", "seconds", "code")
        return {**run, **{name: getattr(self, name) for name in rest}, "overrides": " ".join(self.run.overrides)}


class StudyError(RuntimeError):
    """A run ended with the user's mistake, which the others would repeat."""


def read_result(run: Run, folder: Path) -> Result | None:
    """The result of a run that is finished and was made with the same overrides."""
    try:
        done = json.loads((folder / _DONE).read_text())
    except (OSError, json.JSONDecodeError):
        return None
    if done["overrides"] != list(run.overrides):
        return None
    loss = float("inf") if done["val_loss"] is None else done["val_loss"]
    told = (done[name] for name in ("val_loss_x", "steps", "tokens", "seconds"))
    return Result(run, done["status"], loss, *told, folder, done.get("code", ""))


def _devices(workers: int | None, device: str) -> list[dict[str, Any]]:
    """What each worker may use: a core, or a GPU."""
    if device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
            visible = ",".join(str(number) for number in range(len(listing.splitlines())))
        names = [name for name in visible.split(",") if name]
        return [{"gpu": names[i % len(names)]} for i in range(workers or len(names))] if names else [{}]
    cores = sorted(os.sched_getaffinity(0))
    return [{"core": cores[i % len(cores)]} for i in range(workers or len(cores))]


class Runner:
    """Runs in parallel, one worker per core or GPU."""

    def __init__(self, folder: Path, *, workers: int | None, device: str) -> None:
        self._folder = folder
        self._free: queue.Queue[dict[str, Any]] = queue.Queue()
        places = _devices(workers, device)
        for place in places:
            self._free.put(place)
        self._workers = len(places)
        self._processes: set[subprocess.Popen] = set()
        self._lock, self._stopping = Lock(), False

    def run_all(self, runs: Sequence[Run], report: Callable[[Result, int, int, float], None]) -> list[Result]:
        """All results, in the order of `runs`; those at hand already are not made again.

        Args:
            runs: what to run.
            report: (result, how many are done, of how many, seconds left) after each.

        Raises:
            StudyError: a run was refused.
            KeyboardInterrupt: after all children have ended.
        """
        # runs with the same overrides are one: a variation need not touch every mode
        first = {}
        for run in runs:
            first.setdefault(run.overrides, run)
        results = {run: read_result(run, self._folder / run.folder) for run in first.values()}
        waiting = [run for run, result in results.items() if result is None]
        done, began = len(first) - len(waiting), time.monotonic()
        pool = ThreadPoolExecutor(self._workers)
        futures = {pool.submit(self._run, run): run for run in waiting}
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                result = future.result()
                results[futures[future]] = result
                each = (time.monotonic() - began) / number
                report(result, done + number, len(first), each * (len(waiting) - number))
        finally:
            self._stop()
            pool.shutdown(wait=True, cancel_futures=True)
        return [replace(results[first[run.overrides]], run=run) for run in runs]

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            for process in self._processes:
                process.send_signal(signal.SIGTERM)

    def _run(self, run: Run) -> Result:
        place = self._free.get()
        try:
            return self._run_at(run, place)
        finally:
            self._free.put(place)

    def _run_at(self, run: Run, place: dict[str, Any]) -> Result:
        folder = self._folder / run.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:  # another study may want the same run at this moment
            fcntl.flock(lock, fcntl.LOCK_EX)
            return read_result(run, folder) or self._make(run, folder, place)

    def _make(self, run: Run, folder: Path, place: dict[str, Any]) -> Result:
        began = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        environment = dict(os.environ)
        if "gpu" in place:
            environment["CUDA_VISIBLE_DEVICES"] = place["gpu"]
        pin = ["taskset", "-c", str(place["core"])] if "core" in place and shutil.which("taskset") else []
        command = [*pin, sys.executable, "-m", "megaasync.pretrain", *run.overrides, f'run.dir="{folder}"']
        with self._lock:
            if self._stopping:
                raise StudyError("stopped")
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C comes to us, and we stop them
            )
            self._processes.add(process)
        error = process.communicate()[1].strip()
        with self._lock:
            self._processes.discard(process)
        diverged = process.returncode == 1 and "lower optimizer.lr" in error
        if process.returncode != 0 and not diverged:
            why = error.splitlines()[-1] if error else f"ended with status {process.returncode}"
            raise StudyError(f"{run.label}: {why.removeprefix('error: ')}")
        result = _outcome(run, folder, failed=diverged, seconds=time.monotonic() - began)
        fields = ("status", "val_loss_x", "steps", "tokens", "seconds", "code")
        loss = None if result.status == "failed" else result.val_loss
        done = {"overrides": list(run.overrides), "val_loss": loss, **{name: getattr(result, name) for name in fields}}
        write_json(folder / _DONE, done)
        return result


def _outcome(run: Run, folder: Path, *, failed: bool, seconds: float) -> Result:
    summary = json.loads((folder / "summary.json").read_text())
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "val"]
    at_x = rows[-1].get("loss_x") if rows else None
    loss = float("inf") if failed else summary["val_loss"]
    status = "failed" if failed else "completed"
    code = code_hash(Path(megaasync.__file__).parent)
    return Result(run, status, loss, at_x, summary["steps"], summary["tokens"], seconds, folder, code)
