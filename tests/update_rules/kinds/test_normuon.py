"""normuon against its formulas, and the direction of pytorch_optimizer's."""

import math

import pytest
import pytorch_optimizer
import torch

from megaasync.update_rules.kinds.normuon import NorMuon
from tests.parity.reference import newton_schulz
from tests.support.configs import small_config
from tests.support.trajectories import (
    LR,
    MATRICES,
    STEPS,
    adamw_by_hand,
    assert_equals_by_hand,
    assert_only_matrices_take,
    library_run,
    ours,
)


def direction(o, name, g, s, t):
    if name not in MATRICES:
        return adamw_by_hand(g, s, t, o.betas, o.eps)
    s["m"] = o.momentum * s.get("m", 0) + (1 - o.momentum) * g
    nesterov = (1 - o.momentum) * g + o.momentum * s["m"]
    x = newton_schulz(nesterov, o.newton_schulz_steps) if nesterov.norm() > 0 else nesterov
    s["v"] = o.beta2 * s.get("v", 0) + (1 - o.beta2) * (x**2).mean(1, keepdim=True)
    x = x / (s["v"].sqrt() + o.eps)
    return x * 0.2 * math.sqrt(x.numel()) / x.norm() if x.norm() > 0 else x


def test_equals_ten_lines():
    assert_equals_by_hand(small_config("normuon"), direction)


def test_points_where_a_librarys_does():
    """The library's Newton-Schulz works in bfloat16, so directions are compared."""
    config = small_config("normuon", optimizer__weight_decay=0.0)
    o = config.optimizer

    def make(groups):
        return pytorch_optimizer.NorMuon(
            [{"params": groups[0]["params"], "use_muon": True}],
            lr=LR, momentum=o.momentum, beta2=o.beta2, weight_decay=0.0, update_scale="match_rms", eps=o.eps,
        )  # fmt: skip

    mine, expected = ours(config), library_run(make, 0.0, MATRICES, one_by_one=True)
    for step in (3, 10, STEPS - 1):
        for name in MATRICES:
            a, b = ((run[step][name] - run[step - 1][name]).flatten() for run in (mine, expected))
            assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.999, name
            assert a.norm() == pytest.approx(b.norm().item(), rel=1e-2)


def test_adamw_has_the_rest():
    assert_only_matrices_take(small_config("normuon"), NorMuon)
