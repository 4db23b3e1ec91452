"""soap against its formulas and pytorch_optimizer's."""

import math

import numpy as np
import pytest
import pytorch_optimizer
import torch

from megaasync.update_rules.kinds.soap import Soap
from tests.support.configs import small_config
from tests.support.trajectories import (
    LR,
    MATRICES,
    adamw_by_hand,
    assert_equals_by_hand,
    assert_only_matrices_take,
    random_tensors,
)


def direction(o, name, g, s, t):
    if name not in MATRICES:
        return adamw_by_hand(g, s, t, o.adamw_betas, o.eps)
    (b1, b2), k = o.betas, t - o.first_basis
    s["L"], s["R"] = (b2 * s.get(n, 0) + (1 - b2) * x for n, x in (("L", g @ g.T), ("R", g.T @ g)))
    if k <= 0:
        s["QL"], s["QR"] = (torch.linalg.eigh(s[n])[1].flip(1) for n in "LR")
        return 0 * g
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * (s["QL"].T @ g @ s["QR"]) ** 2
    inside = (s["QL"].T @ s["m"] @ s["QR"]) / (s["v"].sqrt() + o.eps)
    d = s["QL"] @ inside @ s["QR"].T * math.sqrt(1 - b2**k) / (1 - b1**k)
    if k % o.refresh_interval == 0:
        order = {n: torch.diag(s[f"Q{n}"].T @ s[n] @ s[f"Q{n}"]).argsort(descending=True) for n in "LR"}
        s["v"] = s["v"][order["L"]][:, order["R"]]
        s["QL"], s["QR"] = (torch.linalg.qr(s[n] @ s[f"Q{n}"][:, order[n]])[0] for n in "LR")
    return d


def test_equals_ten_lines():
    assert_equals_by_hand(small_config("soap"), direction)


@pytest.mark.parametrize("largest_side", [100, 6])
def test_equals_a_library(largest_side):
    """To 1e-6 before the first step of the bases, 1e-4 after it: the library's QR runs in float32."""
    shapes, steps = {"a": (6, 6), "b": (9, 9), "c": (9, 6)}, 40
    if largest_side == 100:
        del shapes["c"]  # its first R has a null space, whose basis is arbitrary
    rule = Soap((0.95, 0.9), 1e-8, 10, 1, largest_side)
    starts, common = random_tensors(1, shapes), random_tensors(2, shapes)
    mine = {n: z.clone() for n, z in starts.items()}
    states = {n: rule.init(z[None]) for n, z in mine.items()}
    theirs = {n: torch.nn.Parameter(z.clone()) for n, z in starts.items()}
    library = pytorch_optimizer.SOAP(
        theirs.values(), lr=LR, betas=rule.betas, weight_decay=0.0, precondition_frequency=10,
        max_precondition_dim=largest_side,
    )  # fmt: skip
    for step in range(steps):
        own = random_tensors(100 + step, shapes)
        for name, z in mine.items():
            grad = common[name] + own[name]
            theirs[name].grad = grad.clone()
            z.sub_(rule.direction(grad[None], states[name], count=step + 1)[0], alpha=LR)
        library.step()
        for name, z in mine.items():
            tolerance = 1e-6 if step <= 10 else 1e-4
            np.testing.assert_allclose(z.numpy(), theirs[name].detach().numpy(), rtol=0, atol=tolerance, err_msg=name)
    assert all((mine[name] - starts[name]).abs().max() > 10 * LR for name in shapes)


def test_adamw_has_the_rest():
    assert_only_matrices_take(small_config("soap"), Soap)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (3, 3), (5, 2, 4), (0, 3, 4)])
def test_bases_that_are_refreshed_at_every_step_and_sides_without_one(shape):
    """One matrix, stacks and an empty stack; sides longer than four keep their own axes."""
    rule = Soap((0.9, 0.95), 1e-8, 1, 1, 4)
    state = rule.init(torch.zeros(shape))
    for count in range(1, 5):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(count))
        moved = rule.direction(grad, state, count=count)
        assert moved.shape == grad.shape and moved.isfinite().all()
    assert state["left_basis"].shape[-1] == (shape[-2] if shape[-2] <= 4 else 0)
    assert state["right_basis"].shape[-1] == (shape[-1] if shape[-1] <= 4 else 0)
