"""megaasync.pretrain with one fault in one rank: python -m tests.support.faulty KIND RANK [key=value ...].

The run is the real one; only a method of the product is replaced, in the process of that rank. A fault happens once,
at the fourth batch or at the first save: the file that FAULT_DONE names tells later starts that it has.
"""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import torch

from megaasync import pretrain
from megaasync.entry import rank

_STEP = 3


def _happen(kind):
    Path(os.environ["FAULT_DONE"]).touch()
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 79 GiB")
    else:
        raise ZeroDivisionError(f"deliberate, in {kind}")


def _plant(kind):
    from megaasync.checkpoint import writer
    from megaasync.optim.stage_optimizer import StageOptimizer
    from megaasync.pipeline.stage_compute import StageCompute

    owner, name = {
        "forward": (StageCompute, "forward"),
        "nan": (StageCompute, "forward"),
        "kill": (StageCompute, "forward"),
        "memory": (StageCompute, "forward"),
        "stop": (StageCompute, "forward"),
        "backward": (StageCompute, "backward"),
        "step": (StageOptimizer, "step"),
        "copy": (writer, "to_host"),
        "writer": (writer, "bytes_of"),
    }[kind]
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(args)
        # forwards and backwards know their batch; the optimizer is called once a step
        at = args[1][0] if kind not in ("step", "copy", "writer") else len(calls) - 1
        if at == (0 if kind in ("copy", "writer") else _STEP):
            if kind == "nan":  # the input of a stage that is not the first
                args = (*args[:2], args[2] * float("nan"), *args[3:])
            else:
                _happen(kind)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def run_rank(environment, *args):
    kind, chosen = os.environ["FAULT"].split(":")
    if environment.rank == int(chosen) and not Path(os.environ["FAULT_DONE"]).exists():
        _plant(kind)
    return rank.run_rank(environment, *args)


def main():
    os.environ["FAULT"] = f"{sys.argv[1]}:{sys.argv[2]}"
    del sys.argv[1:3]
    pretrain.run_rank = import_module("tests.support.faulty").run_rank  # by a name that ranks can import
    pretrain.main()


if __name__ == "__main__":
    main()
