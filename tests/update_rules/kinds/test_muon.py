"""muon against its formulas and torch.optim.Muon."""

import math

import torch
import torch.optim._muon as torch_muon

from megaasync.update_rules.kinds.muon import Muon
from tests.parity.reference import newton_schulz
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
        return adamw_by_hand(g, s, t, o.betas, o.eps)
    s["m"] = o.momentum * s.get("m", 0) + (1 - o.momentum) * g
    nesterov = (1 - o.momentum) * g + o.momentum * s["m"]
    if nesterov.norm() == 0:
        return nesterov
    return 0.2 * math.sqrt(max(g.shape)) * newton_schulz(nesterov, o.newton_schulz_steps)


def test_equals_ten_lines():
    assert_equals_by_hand(small_config("muon"), direction, atol=1e-9)


def test_equals_torch(monkeypatch):
    """torch's Muon orthogonalises in bfloat16, so its own Newton-Schulz is replaced by a float64 one here."""

    def exact(grad, coefficients, steps, eps):
        return newton_schulz(grad, steps) if grad.norm() > 0 else grad

    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", exact)
    config = small_config("muon")
    o = config.optimizer

    def make(groups):
        (group,) = groups
        return torch.optim.Muon(
            group["params"], lr=LR, weight_decay=o.weight_decay, momentum=o.momentum, adjust_lr_fn="match_rms_adamw"
        )

    theirs = library_run(make, o.weight_decay, MATRICES, one_by_one=True)
    assert_equals_library(config, theirs, 1e-9)


def test_adamw_has_the_rest():
    assert_only_matrices_take(small_config("muon"), Muon)
