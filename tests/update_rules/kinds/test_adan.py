"""adan against its formulas and pytorch_optimizer's."""

import pytorch_optimizer

from tests.support.configs import small_config
from tests.support.trajectories import LR, assert_equals_by_hand, assert_equals_library, library_run


def direction(o, name, g, s, t):
    b1, b2, b3 = o.betas
    change = g - s["g"] if "g" in s else 0 * g
    s["g"], s["m"] = g, b1 * s.get("m", 0) + (1 - b1) * g
    s["q"], s["n"] = b2 * s.get("q", 0) + (1 - b2) * change, b3 * s.get("n", 0) + (1 - b3) * (g + b2 * change) ** 2
    top = s["m"] / (1 - b1**t) + b2 * s["q"] / (1 - b2**t)
    return top / ((s["n"] / (1 - b3**t)).sqrt() + o.eps)


def test_equals_ten_lines():
    assert_equals_by_hand(small_config("adan"), direction)


def test_equals_a_library():
    config = small_config("adan")
    o = config.optimizer

    def make(groups):
        return pytorch_optimizer.Adan(groups, lr=LR, betas=o.betas, eps=o.eps, weight_decouple=True)

    assert_equals_library(config, library_run(make, o.weight_decay), 1e-6)
