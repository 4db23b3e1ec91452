"""lion against its formulas and pytorch_optimizer's."""

import pytorch_optimizer
import torch

from tests.support.configs import small_config
from tests.support.trajectories import LR, assert_equals_by_hand, assert_equals_library, library_run


def direction(o, name, g, s, t):
    m = s.get("m", 0 * g)
    s["m"] = o.betas[1] * m + (1 - o.betas[1]) * g
    return torch.sign(o.betas[0] * m + (1 - o.betas[0]) * g)


def test_equals_three_lines():
    assert_equals_by_hand(small_config("lion"), direction)


def test_equals_a_library():
    config = small_config("lion")
    o = config.optimizer
    theirs = library_run(lambda groups: pytorch_optimizer.Lion(groups, lr=LR, betas=o.betas), o.weight_decay)
    assert_equals_library(config, theirs, 1e-9)
