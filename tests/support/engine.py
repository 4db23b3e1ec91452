"""The engine of one rank, built as a run builds it."""

from datetime import timedelta

import torch

from megaasync.data.prepare import PreparedData
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group
from megaasync.train.build import build_trainer
from tests.support.runs import RunNumbers

ALONE = RankEnvironment(0, 1, 0, 1, "")


def build(environment, config):
    device = torch.device("cpu")
    join_group(environment, device=device, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    return build_trainer(
        config, environment=environment, prepared=PreparedData(None, None, None), device=device, observer=RunNumbers()
    )


def update_of(executor):
    """The updating half of the only stage of a rank."""
    (stage,) = executor.runner.stages.values()
    return stage
