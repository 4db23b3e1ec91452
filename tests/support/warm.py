"""Commands without their second of imports: a process that has them forks for each call.

Ranks come from one fork server, which has torch already, and get the call's environment, folder and output. What is run
is the command itself, in processes of its own; only how it came to be loaded differs. Tests of how a command starts, of
signals to it and of what Python reads from its environment start it cold.
"""

import gc
import importlib
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
from dataclasses import dataclass
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


def _share_the_fork_server() -> None:
    from megaasync.entry import spawn

    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # it is our parent's
    spawn._rank_main = Inherited()


def _become_the_command(call: dict[str, Any]) -> None:
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["environment"])
    for number, path in ((1, call["out"]), (2, call["err"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    program = call["program"]
    sys.argv[:] = [program, *call["arguments"]]
    sys.modules.pop(program, None)  # it is run from its beginning
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def serve(*, with_torch: bool) -> None:
    """Fork for every line of the standard input; answer with the status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in ("hydra", "megaasync.pretrain"):
        importlib.import_module(name)
    if with_torch:
        importlib.import_module("matplotlib.pyplot")  # for tools
        importlib.import_module("megaasync.entry.spawn")._start_fork_server(NEEDED)
    for line in sys.stdin:
        call = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            gc.freeze()  # what is loaded stays
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                if with_torch:
                    _share_the_fork_server()
                _become_the_command(call)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                Path(call["loaded"]).write_text(" ".join({name.split(".")[0] for name in sys.modules}))
                os._exit(status)
        print(json.dumps({"pid": child}), file=answers, flush=True)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status}), file=answers, flush=True)


@dataclass(frozen=True)
class WarmRun:
    """How a command ended, what it wrote, and the names of the packages that its process had loaded."""

    status: int
    out: str
    err: str
    loaded: frozenset[str]


class WarmCommand:
    """The process; it is started at the first call."""

    def __init__(self, *, with_torch: bool) -> None:
        """A process that has torch loaded, and a fork server for ranks; or neither, for what ends before."""
        self._with_torch = with_torch
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def _answer(self, timeout: float) -> dict[str, int] | None:
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return None
        return json.loads(self._process.stdout.readline())

    def __call__(
        self, program: str, arguments: list[str], *, cwd: Path, environment: dict[str, str], timeout: float
    ) -> WarmRun:
        """Run a module, or a script by its path, in a folder.

        Raises:
            TimeoutExpired: it took longer, and was killed.
        """
        with self._lock, tempfile.TemporaryDirectory() as scratch:
            call = {"program": program, "arguments": arguments, "cwd": str(cwd), "environment": environment}
            return self._run(call, {name: Path(scratch) / name for name in ("out", "err", "loaded")}, timeout)

    def _run(self, call: dict[str, Any], files: dict[str, Path], timeout: float) -> WarmRun:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from tests.support.warm import serve; serve(with_torch={self._with_torch})"],
                cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        paths = {name: str(path) for name, path in files.items()}
        print(json.dumps(call | paths), file=self._process.stdin, flush=True)
        child = self._answer(60)["pid"]
        ended = self._answer(timeout)
        if ended is None:
            os.kill(child, signal.SIGKILL)
            self._answer(60)
            written = (files[name].read_text() for name in ("out", "err"))
            raise subprocess.TimeoutExpired([call["program"], *call["arguments"]], timeout, *written)
        loaded = files["loaded"].read_text().split() if files["loaded"].exists() else ()
        return WarmRun(ended["status"], files["out"].read_text(), files["err"].read_text(), frozenset(loaded))
