"""nadam against its formulas and torch.optim.NAdam."""

import math

import torch

from tests.support.configs import small_config
from tests.support.trajectories import LR, assert_equals_by_hand, assert_equals_library, library_run


def direction(o, name, g, s, t):
    b1, b2 = o.betas
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    below = (s["v"] / (1 - b2**t)).sqrt() + o.eps
    mu = [b1 * (1 - 0.5 * 0.96 ** (i * o.momentum_decay)) for i in range(1, t + 2)]
    done = math.prod(mu[:-1])
    return ((1 - mu[-2]) * g / (1 - done) + mu[-1] * s["m"] / (1 - done * mu[-1])) / below


def test_equals_ten_lines():
    assert_equals_by_hand(small_config("nadam"), direction)


def test_equals_torch():
    config = small_config("nadam")
    o = config.optimizer

    def make(groups):
        return torch.optim.NAdam(
            groups, lr=LR, betas=o.betas, eps=o.eps, momentum_decay=o.momentum_decay, decoupled_weight_decay=True
        )

    assert_equals_library(config, library_run(make, o.weight_decay), 1e-9)
