"""adamw against torch.optim.AdamW."""

import torch

from tests.support.configs import small_config
from tests.support.trajectories import assert_equals_library, library_run


def test_equals_torch():
    config = small_config("adamw")
    o = config.optimizer
    theirs = library_run(lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=o.betas, eps=o.eps), o.weight_decay)
    assert_equals_library(config, theirs, 1e-11)
