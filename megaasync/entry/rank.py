"""What a rank runs, importable by name from any process: nothing that a rank needs may live in `__main__`."""

import importlib

from megaasync.distributed.environment import RankEnvironment
from megaasync.train.rank_job import RankJob


def run_rank(environment: RankEnvironment, job: RankJob) -> str:
    """Train on one rank; see `megaasync.train.worker.run_rank`. The first import of torch."""
    return importlib.import_module("megaasync.train.worker").run_rank(environment, job)
