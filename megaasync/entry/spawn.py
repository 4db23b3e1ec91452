"""Ranks on this host, from a fork server that has torch loaded: the first one costs an import, the others nothing."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from megaasync.config import ConfigError
from megaasync.data import DataError
from megaasync.distributed import TransportError
from megaasync.distributed.environment import RankEnvironment, meet_on_this_host
from megaasync.distributed.heartbeat import HangDetector, make_heartbeat_file
from megaasync.distributed.interrupts import noted_by
from megaasync.entry.console import tolerate_console
from megaasync.entry.file_errors import explain_file_error
from megaasync.entry.private_folder import private_folder
from megaasync.pipeline import MemoryFullError, TrainingError
from megaasync.schedules import ScheduleError

_GRACE_SECONDS = 28.0  # for a checkpoint, from an interrupt to the ranks' end by force
_LINGER_SECONDS = 2.0  # from one rank's failure to the others' end by force
_HANG_MARGIN_SECONDS = 5.0  # beyond the ranks' own timeout, whose messages say more
_PRELOAD = "megaasync.train.worker"
_PRELOAD_LAST = "megaasync.entry.frozen_imports"
_PR_SET_PDEATHSIG = 1
_LOST = ("Connection closed by peer", "Connection reset by peer")
_STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})


class RankFailed(RuntimeError):
    """A rank ended with an error.

    Attributes:
        is_user_error: a wrong config, file or environment.
        is_retryable: not a wrong config and nothing that training or the user came to, so another try may go well.
        details: traceback and last actions, may be empty.
    """

    def __init__(self, message: str, *, is_user_error: bool, is_retryable: bool, details: str) -> None:
        super().__init__(message)
        self.is_user_error, self.is_retryable, self.details = is_user_error, is_retryable, details


class Interrupted(RuntimeError):
    """The user asked for an end."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a rank says last."""

    value: Any = None
    error: str | None = None
    is_user_error: bool = False
    is_retryable: bool = True
    details: str = ""
    lost_peer: bool = False  # it failed because another rank was gone
    died: bool = False  # it said nothing
    unknown_cause: bool = False  # it waited for others, but cannot say for which one


def _die_with_the_launcher(meeting: Path) -> None:
    """End this process when the launcher or the fork server ends, however they end.

    A launcher that was killed leaves its private folder, in which `meeting` is: the ranks remove it.

    The kernel's signal covers the fork server, which is this process's parent; the launcher is watched by a thread,
    because the fork server outlives it while it has children.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sentinel = parent_process().sentinel

    def watch() -> None:
        wait([sentinel])
        shutil.rmtree(meeting.parent, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher watch").start()


def _rank_main(
    connection: Connection, target: Callable[..., Any], environment: RankEnvironment, args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher alone decides what an interrupt means
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # The fork server blocks them. Those that only ask for a checkpoint wait until the rank can heed them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING - {signal.SIGUSR1, signal.SIGUSR2})
    _die_with_the_launcher(environment.board.parent)
    tolerate_console()
    meet_on_this_host()
    try:
        ended = _Ended(value=target(environment, *args))
    except BaseException as error:
        is_user_error = isinstance(error, ConfigError | DataError | ScheduleError)
        is_file = isinstance(error, OSError) and not isinstance(error, ConnectionError)
        # of these the message is enough
        own = is_user_error or is_file or isinstance(error, TrainingError | MemoryFullError | TransportError)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        message = str(error) if own else f"{type(error).__name__}: {error}{notes}"
        message = explain_file_error(error) if is_file else message
        lost_peer = error.is_lost if isinstance(error, TransportError) else any(words in message for words in _LOST)
        details = "" if own else traceback.format_exc()
        ended = _Ended(
            error=message,
            is_user_error=is_user_error,
            is_retryable=not (is_user_error or isinstance(error, TrainingError | MemoryFullError)),
            details=details,
            lost_peer=lost_peer,
            unknown_cause=isinstance(error, TransportError) and error.peer is None,
        )
    connection.send(ended)
    connection.close()
    if ended.error is not None:
        os._exit(1)  # the group may hang in its own clean-up when a peer is gone


@contextmanager
def _held_back() -> Iterator[None]:
    """Signals that stop a run arrive after this."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def _start_fork_server(preload: Sequence[str]) -> ForkServerContext:
    """The fork server, deaf to signals that stop a run: it must outlive the ranks, which end in good order.

    The mask is inherited by the server at its start. The resource tracker is started first because its start unblocks
    signals.
    """
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # a launcher of Hydra's runs us in a process of its own kind, which plain ones cannot be told to be
        multiprocessing.set_start_method("forkserver", force=True)
    context = get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD, *preload, _PRELOAD_LAST])
    resource_tracker.ensure_running()
    usual = tempfile.tempdir
    tempfile.tempdir = str(private_folder())  # where its sockets go
    try:
        with _held_back():
            forkserver.ensure_running()
    finally:
        tempfile.tempdir = usual
    return context


def spawn_ranks(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    world_size: int,
    names: Sequence[str] | None = None,
    hang_seconds: float | None = None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run `target(environment, *args)` on `world_size` ranks of this host and wait for them.

    Args:
        target: importable by name.
        args: picklable.
        world_size: number of ranks.
        names: what to call the ranks in messages; `rank 0` and so on by default.
        hang_seconds: a rank that begins nothing new for so long, and a margin, hangs; None for no limit.
        preload: modules that the ranks will need: they are imported once, before the ranks are forked.

    Returns:
        The ranks' return values, by rank.

    Raises:
        RankFailed: a rank failed; the others were ended.
        Interrupted: SIGINT or SIGTERM came, and the ranks ended of themselves or were ended.
    """
    names = names or [f"rank {rank}" for rank in range(world_size)]
    interrupts: list[tuple[float, int]] = []
    all_started = False

    def on_interrupt(number: int, *_: object) -> None:
        interrupts.append((time.monotonic(), number))
        if not all_started:
            raise Interrupted("interrupted")

    with tempfile.TemporaryDirectory(dir=private_folder()) as meeting:
        processes, connections = [], []
        # whoever ignores a signal, as nohup does, goes on ignoring it
        handled = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, on_interrupt) for number in handled}
        try:
            if noted_by(previous.values()):
                raise Interrupted("interrupted")
            context = _start_fork_server(preload)
            board = make_heartbeat_file(Path(meeting) / "board", num_slots=world_size)
            for rank in range(world_size):
                receiving, sending = context.Pipe(duplex=False)
                environment = RankEnvironment(
                    rank,
                    world_size,
                    rank,
                    world_size,
                    f"file://{Path(meeting) / 'store'}",
                    board=Path(meeting) / "board",
                )
                process = context.Process(target=_rank_main, args=(sending, target, environment, args))
                with _held_back():  # a rank that has started is one that we know of, and end
                    process.start()
                    processes.append(process)
                sending.close()
                connections.append(receiving)
            all_started = True
            detector = HangDetector(board, num_slots=world_size, now=time.monotonic())
            return _wait_for(processes, connections, interrupts, names, detector=detector, hang_seconds=hang_seconds)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                process.join()
            for number, handler in previous.items():
                signal.signal(number, handler)


def _wait_for(
    processes: list,
    connections: list[Connection],
    interrupts: list[tuple[float, int]],
    names: Sequence[str],
    *,
    detector: HangDetector,
    hang_seconds: float | None,
) -> list[Any]:
    """Collect every rank's last word; see `spawn_ranks`."""
    ended: dict[int, _Ended] = {}
    forwarded = False
    failures: list[_Ended] = []  # in order of time
    failed_at = 0.0
    while len(ended) < len(processes):
        waiting = {connection: rank for rank, connection in enumerate(connections) if rank not in ended}
        for ready in wait(list(waiting), timeout=0.1):
            rank = waiting[ready]
            try:
                ended[rank] = ready.recv()
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                ended[rank] = _Ended(error=f"{names[rank]} died without a word (exit code {code})", died=True)
            if ended[rank].error is not None:
                failed_at = failed_at if failures else time.monotonic()
                failures.append(ended[rank])
        now = time.monotonic()
        detector.poll(now)
        hung = None if hang_seconds is None else detector.hung(limit=hang_seconds + _HANG_MARGIN_SECONDS)
        if hung is not None and hung not in ended and not failures:
            failed_at = now - _LINGER_SECONDS
            failures.append(
                _Ended(
                    error=f"{names[hung]} hangs: it has begun nothing for {hang_seconds:g} s (parallel.timeout_seconds)"
                )
            )
        if interrupts and not forwarded:
            forwarded = True
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGTERM)
        is_insisted_on = sum(number == signal.SIGINT for _, number in interrupts) > 1  # Ctrl-C twice
        # those that ask for a checkpoint leave it the time it takes
        is_urgent = any(number not in (signal.SIGUSR1, signal.SIGUSR2) for _, number in interrupts)
        is_late = is_urgent and now > interrupts[0][0] + _GRACE_SECONDS
        if interrupts and (is_late or is_insisted_on):
            break
        if failures and now > failed_at + _LINGER_SECONDS:
            break
    own_failures = [failure for failure in failures if not (failure.lost_peer or failure.died)]
    if interrupts and not own_failures:
        raise Interrupted("interrupted")
    if failures:
        # A rank that lost its peer fails too, and sometimes sooner than the news of the peer arrives; an error without
        # a traceback is one of ours or a death, and explains the rest.
        causes = [failure for failure in failures if not failure.lost_peer] or failures
        causes = [candidate for candidate in causes if not candidate.details] or causes
        cause = next((candidate for candidate in causes if not candidate.unknown_cause), causes[0])
        details = cause.details
        if cause.is_retryable:
            lasts = [f"  {name}: {detector.describe(rank)}" for rank, name in enumerate(names)]
            details = "\n".join([details, "last action of each rank:", *lasts]).lstrip()
        raise RankFailed(
            cause.error,
            is_user_error=cause.is_user_error,
            is_retryable=cause.is_retryable and not interrupts,
            details=details,
        )
    for process in processes:
        process.join()
    return [ended[rank].value for rank in range(len(processes))]
