"""What a rank runs, importable by name from any process: nothing that a rank needs may live in `__main__`."""

import importlib
from typing import Any

from megaasync.distributed.environment import RankEnvironment


def run_rank(environment: RankEnvironment, *arguments: Any) -> str:
    """Train on one rank; see `megaasync.train.worker.run_rank`. The first import of torch."""
    return importlib.import_module("megaasync.train.worker").run_rank(environment, *arguments)
