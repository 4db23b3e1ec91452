"""mars against its formulas and pytorch_optimizer's."""

import pytorch_optimizer

from megaasync.update_rules.kinds.mars import Mars
from tests.support.configs import small_config
from tests.support.trajectories import (
    LR,
    MATRICES,
    adamw_by_hand,
    assert_equals_by_hand,
    assert_equals_library,
    assert_only_matrices_take,
    library_run,
)


def direction(o, name, g, s, t):
    if name not in MATRICES:
        return adamw_by_hand(g, s, t, o.adamw_betas, o.eps)
    b1 = o.betas[0]
    c = g + o.gamma * b1 / (1 - b1) * (g - s.get("g", 0))
    s["g"] = g
    return adamw_by_hand(c / max(1.0, c.norm().item()), s, t, o.betas, o.eps)


def test_equals_ten_lines():
    assert_equals_by_hand(small_config("mars"), direction)


def test_equals_a_library():
    config = small_config("mars")
    o = config.optimizer

    def make(groups):
        return pytorch_optimizer.MARS(groups, lr=LR, betas=o.betas, gamma=o.gamma, eps=o.eps)

    assert_equals_library(config, library_run(make, o.weight_decay, MATRICES, one_by_one=True), 2e-5)


def test_adamw_has_the_rest():
    assert_only_matrices_take(small_config("mars"), Mars)
