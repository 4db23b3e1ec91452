"""Each rule against an independent implementation, error feedback against the literal recurrence, and edge cases."""

import math

import numpy as np
import pytest
import torch

from megaasync.models.parameters import roles_of
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.newton_schulz import orthogonalize
from megaasync.optim.routing import Role, route_parameters
from megaasync.optim.stage_optimizer import StageOptimizer
from tests.support.configs import small_config

SHAPES = {
    "embedding.weight": (11, 6),
    "layers.0.attention.query.weight": (6, 6),
    "layers.0.attention.key.weight": (3, 6),
    "layers.0.mlp.router.weight": (4, 6),
    "layers.0.mlp.experts.gate": (4, 5, 6),
    "layers.0.mlp.experts.down": (4, 6, 5),
    "layers.0.mlp_norm.weight": (6,),
    "layers.1.attention.query.weight": (6, 6),
    "head.weight": (11, 6),
}


def random_tensors(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


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
        self.optimizer.step(flat, scale=scale, publish=self.published, lookahead_steps=self._ahead)

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


def test_adamw_equals_torch():
    config = small_config("adamw")
    initial = random_tensors(0)
    ours = Product(config, initial, lr_of)
    theirs = {n: torch.nn.Parameter(p.clone()) for n, p in initial.items()}
    o = config.optimizer
    no_decay = [p for p in theirs.values() if p.dim() == 1]
    decay = [p for p in theirs.values() if p.dim() > 1]
    adam = torch.optim.AdamW(
        [{"params": decay, "weight_decay": o.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
        betas=o.betas,
        eps=o.eps,
    )
    for k in range(50):
        grads = random_tensors(100 + k)
        for group in adam.param_groups:
            group["lr"] = lr_of(k)
        for name, parameter in theirs.items():
            parameter.grad = grads[name].clone()
        adam.step()
        ours.step(grads)
    for name, parameter in theirs.items():
        np.testing.assert_allclose(ours.z[name].numpy(), parameter.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_muon_equals_torch_in_float32():
    """torch's Muon orthogonalises in bfloat16, so its own Newton-Schulz is replaced by a float64 one here."""
    import torch.optim._muon as torch_muon

    config = small_config("muon")
    shapes = {n: s for n, s in SHAPES.items() if roles_of(SHAPES)[n] is Role.MATRIX}
    initial = random_tensors(1)
    ours = Product(config, initial, lr_of)
    theirs = {n: torch.nn.Parameter(initial[n].clone()) for n in shapes}
    muon = torch.optim.Muon(
        theirs.values(),
        weight_decay=config.optimizer.weight_decay,
        momentum=config.optimizer.momentum,
        adjust_lr_fn="match_rms_adamw",
    )

    def exact(grad, coefficients, steps, eps):
        a, b, c = coefficients
        x = grad.T if grad.size(0) > grad.size(1) else grad
        x = x / x.norm()
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if grad.size(0) > grad.size(1) else x

    original = torch_muon._zeropower_via_newtonschulz
    torch_muon._zeropower_via_newtonschulz = exact
    try:
        for k in range(50):
            grads = random_tensors(200 + k)
            for group in muon.param_groups:
                group["lr"] = lr_of(k)
            for name, parameter in theirs.items():
                parameter.grad = grads[name].clone()
            muon.step()
            ours.step(grads)
    finally:
        torch_muon._zeropower_via_newtonschulz = original
    for name, parameter in theirs.items():
        np.testing.assert_allclose(ours.z[name].numpy(), parameter.detach().numpy(), rtol=1e-9, atol=1e-11)


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


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_a_zero_gradient_gives_decay_only(optimizer):
    """Which tensors shrink is what the routing table says; an expert never touched stays finite."""
    config = small_config(optimizer)
    initial = random_tensors(5)
    ours = Product(config, initial, lambda k: 0.1)
    ours.step({n: torch.zeros_like(p) for n, p in initial.items()})
    for name, z in ours.z.items():
        decay = 0.0 if z.dim() == 1 else config.optimizer.weight_decay
        np.testing.assert_allclose(z.numpy(), ((1 - 0.1 * decay) * initial[name]).numpy(), rtol=1e-12)


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


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (3, 3), (4, 9), (9, 4), (2, 5, 8), (2, 8, 5), (32, 32)])
def test_singular_values_come_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrices, steps=5))
    assert values.max() < 1.25
    if shape[-1] != shape[-2]:
        assert values.min() > 0.5  # Keller's coefficients end between 0.68 and 1.13 on well-conditioned matrices


def test_keller_range_on_gaussian_matrices():
    """docs/method.md: 0.68 to 1.13 on a Gaussian 256 x 1024."""
    wide = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(wide, steps=5))
    assert 0.64 < values.min() < values.max() < 1.17


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12])
def test_orthogonalisation_ignores_scale(scale):
    matrix = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        orthogonalize(matrix * scale, steps=5), orthogonalize(matrix, steps=5), rtol=1e-4, atol=1e-5
    )


def test_orthogonalisation_leaves_its_input_and_zero_alone():
    matrix = torch.randn(2, 4, 6)
    matrix[1] = 0
    before = matrix.clone()
    result = orthogonalize(matrix, steps=5)
    assert torch.equal(matrix, before)
    assert torch.equal(result[1], torch.zeros(4, 6))
    assert result.isfinite().all()


def test_float32_master_moves_where_bfloat16_would_not():
    """Weight 1.0, update 1e-4, 100 steps: the master moves by 1e-2 though bf16 cannot hold a single step."""
    layout = FlatParamLayout(
        {"w": (8, 8)}, route_parameters({"w": Role.MATRIX}, small_config("sgd", optimizer__weight_decay=0.0).optimizer)
    )
    start = torch.ones(8, 8, dtype=torch.bfloat16)
    optimizer = StageOptimizer(layout, [start], dtype=torch.float32, learning_rate=lambda k: 1e-4)
    published = torch.zeros(layout.size, dtype=torch.bfloat16)
    for _ in range(100):
        optimizer.step(torch.ones(layout.size), scale=1.0, publish=published, lookahead_steps=0)
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
            optimizer.step(gradient, scale=1.0, publish=versions[-1], lookahead_steps=int(mode == "error_feedback"))
            if abs(optimizer.master[0]) > 1e6:
                break
        return abs(optimizer.master[0].item())

    assert end(stable) < 1 < end(unstable)
