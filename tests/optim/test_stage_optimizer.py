"""The stage optimizer: error feedback against the literal recurrence, routing, scaling, parts, and stability limits."""

import math

import numpy as np
import pytest
import torch

from megaasync.models.parameters import roles_of
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import Role, route_parameters
from megaasync.optim.stage_optimizer import StageOptimizer
from tests.support.configs import small_config
from tests.support.trajectories import SHAPES, random_tensors


class Product:
    """The product's optimizer on named tensors."""

    def __init__(self, config, initial, learning_rate, error_feedback=False):
        self.layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), config.optimizer))
        self.optimizer = StageOptimizer(
            self.layout,
            list(initial.values()),
            dtype=torch.float64,
            learning_rate=learning_rate,
        )
        self._ahead = int(error_feedback)
        self.published = torch.zeros(self.layout.size, dtype=torch.float64)

    def step(self, grads, scale=1.0):
        flat = torch.zeros(self.layout.size, dtype=torch.float64)
        for view, grad in zip(self.layout.views(flat), grads.values(), strict=True):
            view.copy_(grad)
        self.optimizer.step(flat, scale=scale, out=self.published, lookahead_steps=self._ahead)

    def named(self, flat):
        return dict(zip(self.layout.names, self.layout.views(flat), strict=True))

    @property
    def z(self):
        return self.named(self.optimizer.master)

    @property
    def x(self):
        return self.named(self.published)


def lr_of(k):
    return 0.02 / (1 + k)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_error_feedback_without_a_buffer_is_the_literal_recurrence(optimizer):
    """x_{t+1} = x_t - 2 u_{t-1} + u_{t-2}, with decay taken at z_t = x_t + u_{t-2} (docs/method.md)."""
    config = small_config(optimizer)
    initial = random_tensors(2)
    ours = Product(config, initial, lr_of, error_feedback=True)
    plain = Product(config, initial, lr_of)  # gives u as the move of its z
    x = {n: p.clone() for n, p in initial.items()}
    u_before = {n: torch.zeros_like(p) for n, p in initial.items()}
    for k in range(60):
        grads = random_tensors(300 + k)
        before = {n: p.clone() for n, p in plain.z.items()}
        for name, z in before.items():
            np.testing.assert_allclose((x[name] + u_before[name]).numpy(), z.numpy(), rtol=0, atol=1e-12)
        plain.step(grads)
        ours.step(grads)
        u = {n: before[n] - p for n, p in plain.z.items()}
        x = {n: x[n] - 2 * u[n] + u_before[n] for n in x}
        u_before = u
        for name, published in ours.x.items():
            np.testing.assert_allclose(published.numpy(), x[name].numpy(), rtol=0, atol=1e-12, err_msg=name)


def test_the_gradient_is_scaled_before_the_rule_sees_it():
    config = small_config("sgd", optimizer__weight_decay=0.0)
    initial, grads = random_tensors(3), random_tensors(4)
    ours = Product(config, initial, lambda k: 1.0)
    ours.step(grads, scale=0.25)
    for name, z in ours.z.items():
        np.testing.assert_allclose(z.numpy(), (initial[name] - 0.25 * grads[name]).numpy())


def test_routing_table():
    config = small_config("muon")
    table = route_parameters(roles_of(SHAPES), config.optimizer)
    muon = {n for n, route in table.items() if type(route.rule).__name__ == "Muon"}
    assert muon == {n for n in SHAPES if "attention" in n or "experts" in n}
    assert {n for n, route in table.items() if route.weight_decay == 0} == {"layers.0.mlp_norm.weight"}
    assert {r.role for r in table.values()} == set(Role)
    assert all(
        type(r.rule).__name__ == "AdamW"
        for r in route_parameters(roles_of(SHAPES), small_config("adamw").optimizer).values()
    )


def test_equal_matrices_are_one_stack():
    """Newton-Schulz runs once per shape, not once per tensor."""
    layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), small_config("muon").optimizer))
    stacks = sorted(tuple(g.view(torch.zeros(layout.size)).shape) for g in layout.groups if g.matrix_shape)
    assert stacks == [(1, 3, 6), (2, 6, 6), (4, 5, 6), (4, 6, 5)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_in_parts_is_the_step(optimizer, monkeypatch):
    """Scratch is bounded by taking a group in parts; at any size the same weights come out."""
    config, initial = small_config(optimizer), random_tensors(6)

    def weights():
        product = Product(config, initial, lr_of, error_feedback=True)
        for k in range(3):
            product.step(random_tensors(k))
        return product.optimizer.master, product.published

    whole = weights()
    monkeypatch.setattr("megaasync.optim.stage_optimizer.CACHED_SCRATCH", 40)
    for a, b in zip(whole, weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def test_views_cover_the_buffer_once():
    layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), small_config("muon").optimizer))
    flat = torch.zeros(layout.size)
    for view in layout.views(flat):
        view.add_(1)
    assert flat.max() == 1
    assert int(flat.sum()) == sum(math.prod(s) for s in SHAPES.values())


def test_float32_master_moves_where_bfloat16_would_not():
    """Weight 1.0, update 1e-4, 100 steps: the master moves by 1e-2 though bf16 cannot hold a single step."""
    layout = FlatParamLayout(
        {"w": (8, 8)}, route_parameters({"w": Role.MATRIX}, small_config("sgd", optimizer__weight_decay=0.0).optimizer)
    )
    start = torch.ones(8, 8, dtype=torch.bfloat16)
    optimizer = StageOptimizer(layout, [start], dtype=torch.float32, learning_rate=lambda k: 1e-4)
    published = torch.zeros(layout.size, dtype=torch.bfloat16)
    for _ in range(100):
        optimizer.step(torch.ones(layout.size), scale=1.0, out=published, lookahead_steps=0)
    assert torch.allclose(layout.views(optimizer.master)[0], torch.full((8, 8), 0.99), atol=1e-5)
    assert published[0] < 1


@pytest.mark.parametrize(
    ("mode", "stable", "unstable"), [("sync", 1.98, 2.02), ("delayed", 0.98, 1.02), ("error_feedback", 0.61, 0.63)]
)
def test_stability_limits_on_a_quadratic(mode, stable, unstable):
    """SGD on a scalar quadratic: a < 2, a < 1, a < 0.618 (docs/method.md)."""

    optimizer_config = small_config("sgd", optimizer__weight_decay=0.0).optimizer

    def end(a):
        layout = FlatParamLayout({"w": (1,)}, route_parameters({"w": Role.VECTOR}, optimizer_config))
        optimizer = StageOptimizer(
            layout,
            [torch.ones(1, dtype=torch.float64)],
            dtype=torch.float64,
            learning_rate=lambda k: a,
        )
        versions = [torch.ones(layout.size, dtype=torch.float64)]
        for t in range(1500):
            gradient = versions[t if mode == "sync" else max(t - 1, 0)].clone()
            versions.append(torch.zeros(layout.size, dtype=torch.float64))
            optimizer.step(gradient, scale=1.0, out=versions[-1], lookahead_steps=int(mode == "error_feedback"))
            if abs(optimizer.master[0]) > 1e6:
                break
        return abs(optimizer.master[0].item())

    assert end(stable) < 1 < end(unstable)
