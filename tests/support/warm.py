"""`python -m megaasync.pretrain` without its second of imports: a process that has them forks for each call.

Ranks come from one fork server, which has torch already, and get the call's environment, folder and output. What is run
is the command itself, in processes of its own; only how it came to be loaded differs. Tests of how a command starts, of
signals to it and of its environment start it cold.
"""

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
NEEDED = ["megaasync.checkpoint.dcp_io", "torch.fx.experimental.symbolic_shapes"]


class Inherited:
    """A rank's main function: as the command's own ranks, it has the environment and the output of the command."""

    def __init__(self, output: tuple[Any, ...] = (), environment: dict[str, str] | None = None) -> None:
        self.output, self.environment = output, environment

    def __reduce__(self) -> tuple:
        return Inherited, ((reduction.DupFd(1), reduction.DupFd(2)), dict(os.environ))

    def __call__(self, *args: Any) -> Any:
        from megaasync.entry import spawn

        for number, duplicate in zip((1, 2), self.output, strict=True):
            os.dup2(duplicate.detach(), number)
        os.environ.clear()
        os.environ.update(self.environment)
        return spawn._rank_main(*args)


def _become_the_command(call: dict[str, Any]) -> None:
    from megaasync.entry import spawn

    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # it is our parent's
    spawn._rank_main = Inherited()
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["environment"])
    for number, path in ((1, call["out"]), (2, call["err"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv[1:] = call["arguments"]
    del sys.modules["megaasync.pretrain"]  # it is run as a program, from its beginning
    runpy.run_module("megaasync.pretrain", run_name="__main__", alter_sys=True)


def serve() -> None:
    """Fork for every line of the standard input; answer with the status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import hydra  # noqa: F401

    import megaasync.pretrain
    from megaasync.entry.spawn import _start_fork_server

    assert megaasync.pretrain
    _start_fork_server(NEEDED)
    for line in sys.stdin:
        call = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                _become_the_command(call)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(json.dumps({"pid": child}), file=answers, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status}), file=answers, flush=True)


class WarmCommand:
    """The process; it is started at the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def _answer(self, timeout: float) -> dict[str, int] | None:
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return None
        return json.loads(self._process.stdout.readline())

    def __call__(
        self, arguments: list[str], *, cwd: Path, environment: dict[str, str], timeout: float
    ) -> tuple[int, str, str]:
        """(status, standard output, standard error) of one run.

        Raises:
            TimeoutExpired: it took longer, and was killed.
        """
        with self._lock, tempfile.TemporaryDirectory() as scratch:
            return self._run(arguments, cwd, environment, Path(scratch), timeout)

    def _run(
        self, arguments: list[str], cwd: Path, environment: dict[str, str], scratch: Path, timeout: float
    ) -> tuple[int, str, str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from tests.support.warm import serve; serve()"],
                cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
        out, err = scratch / "out", scratch / "err"
        call = {"arguments": arguments, "cwd": str(cwd), "environment": environment, "out": str(out), "err": str(err)}
        print(json.dumps(call), file=self._process.stdin, flush=True)
        child = self._answer(60)["pid"]
        ended = self._answer(timeout)
        if ended is None:
            os.kill(child, signal.SIGKILL)
            self._answer(60)
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), err.read_text())
        return ended["status"], out.read_text(), err.read_text()
