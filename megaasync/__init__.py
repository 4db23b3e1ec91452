"""Pretraining with asynchronous pipeline parallelism. Importing this package imports no torch."""

import importlib
import os
import signal
import sys
from typing import Any

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # `python -m megaasync...` is being looked up: a Ctrl-C while it is imported ends it without a traceback
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

__version__ = "0.1.0"

_MODULES = {
    "Config": "megaasync.config",
    "build_trainer": "megaasync.train.build",
    "PipelineSchedule": "megaasync.schedules",
    "SCHEDULES": "megaasync.schedules",
    "check": "megaasync.schedules",
    "render": "megaasync.schedules.render",
}

__all__ = [
    "SCHEDULES",
    "Config",
    "PipelineSchedule",
    "build_trainer",
    "check",
    "render",
]


def __getattr__(name: str) -> Any:
    """Public names, imported when first asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megaasync' has no attribute '{name}'")
    module = importlib.import_module(_MODULES[name])
    return module.render_text if name == "render" else getattr(module, name)
