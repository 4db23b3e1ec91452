"""nadam, lion, adan, normuon, mars, soap: each against ten lines here and a published library, for 50 steps."""

import math

import numpy as np
import pytest
import pytorch_optimizer
import torch

from megaasync.models.parameters import roles_of
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.matrix_rules import Mars, NorMuon
from megaasync.optim.routing import Role, render_routing, route_parameters
from megaasync.optim.soap import Soap
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.optim.update_rule import state_elements
from tests.optim.test_rules import SHAPES, random_tensors
from tests.parity.reference import newton_schulz
from tests.support.configs import small_config

MATRICES = [name for name in SHAPES if "attention" in name or "experts" in name]
LR, STEPS = 0.01, 50


def gradients(step):
    """Correlated from step to step, as those of a training are; one tensor gets none in the first steps."""
    common, own = random_tensors(1000), random_tensors(step)
    found = {name: common[name] + own[name] for name in SHAPES}
    if step < 3:
        found["layers.1.attention.query.weight"].zero_()
    return found


def ours(config, *, error_feedback=False):
    """Trajectory of z by name."""
    layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), config.optimizer))
    optimizer = StageOptimizer(
        layout, list(random_tensors(7).values()), dtype=torch.float64, learning_rate=lambda k: LR
    )
    published, found = torch.zeros(layout.size, dtype=torch.float64), []
    for step in range(STEPS):
        flat = torch.zeros(layout.size, dtype=torch.float64)
        for view, grad in zip(layout.views(flat), gradients(step).values(), strict=True):
            view.copy_(grad)
        optimizer.step(flat, scale=1.0, publish=published, lookahead_steps=int(error_feedback))
        whole = torch.zeros_like(flat)
        layout.scatter_shard(optimizer.master, whole)
        found.append({n: v.clone() for n, v in zip(layout.names, layout.views(whole), strict=True)})
    return found


def orthogonal(x, steps):
    return newton_schulz(x, steps) if x.norm() > 0 else x


def soap_direction(o, g, s, t):
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


def reference_direction(o, name, g, s, t):
    """One matrix or vector."""
    if o.name == "lion":
        m = s.get("m", 0 * g)
        s["m"] = o.betas[1] * m + (1 - o.betas[1]) * g
        return torch.sign(o.betas[0] * m + (1 - o.betas[0]) * g)
    if o.name == "adan":
        b1, b2, b3 = o.betas
        change = g - s["g"] if "g" in s else 0 * g
        s["g"], s["m"] = g, b1 * s.get("m", 0) + (1 - b1) * g
        s["q"], s["n"] = b2 * s.get("q", 0) + (1 - b2) * change, b3 * s.get("n", 0) + (1 - b3) * (g + b2 * change) ** 2
        top = s["m"] / (1 - b1**t) + b2 * s["q"] / (1 - b2**t)
        return top / ((s["n"] / (1 - b3**t)).sqrt() + o.eps)
    if o.name == "normuon" and name in MATRICES:
        s["m"] = o.momentum * s.get("m", 0) + (1 - o.momentum) * g
        x = orthogonal((1 - o.momentum) * g + o.momentum * s["m"], o.newton_schulz_steps)
        s["v"] = o.beta2 * s.get("v", 0) + (1 - o.beta2) * (x**2).mean(1, keepdim=True)
        x = x / (s["v"].sqrt() + o.eps)
        return x * 0.2 * math.sqrt(x.numel()) / x.norm() if x.norm() > 0 else x
    if o.name == "soap" and name in MATRICES:
        return soap_direction(o, g, s, t)
    b1, b2 = getattr(o, "adamw_betas", o.betas) if name not in MATRICES else o.betas
    if o.name == "mars" and name in MATRICES:
        c = g + o.gamma * b1 / (1 - b1) * (g - s.get("g", 0))
        s["g"], g = g, c / max(1.0, c.norm().item())
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    below = (s["v"] / (1 - b2**t)).sqrt() + o.eps
    if o.name == "nadam":
        mu = [b1 * (1 - 0.5 * 0.96 ** (i * o.momentum_decay)) for i in range(1, t + 2)]
        done = math.prod(mu[:-1])
        return ((1 - mu[-2]) * g / (1 - done) + mu[-1] * s["m"] / (1 - done * mu[-1])) / below
    return s["m"] / (1 - b1**t) / below


def by_hand(config):
    o, z, states, found = config.optimizer, random_tensors(7), {}, []
    for step in range(STEPS):
        for name, g in gradients(step).items():
            decay = 0.0 if len(SHAPES[name]) == 1 else o.weight_decay
            parts = list(zip(z[name], g, strict=True)) if g.dim() == 3 else [(z[name], g)]
            moved = [
                w - LR * (reference_direction(o, name, one, states.setdefault((name, i), {}), step + 1) + decay * w)
                for i, (w, one) in enumerate(parts)
            ]
            z[name] = torch.stack(moved) if g.dim() == 3 else moved[0]
        found.append(dict(z))
    return found


OPTIMIZERS = ["nadam", "lion", "adan", "normuon", "mars", "soap"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_ten_lines(name):
    config = small_config(name)
    for step, (mine, expected) in enumerate(zip(ours(config), by_hand(config), strict=True)):
        for parameter, z in expected.items():
            np.testing.assert_allclose(
                mine[parameter].numpy(), z.numpy(), rtol=0, atol=1e-10, err_msg=f"{parameter} after step {step + 1}"
            )


def theirs(name, config):
    """A library's trajectory of the parameters that it has the same rule for."""
    o, start = config.optimizer, random_tensors(7)
    names = MATRICES if name in ("normuon", "mars") else list(SHAPES)
    flat = []  # experts one by one: the rules are per matrix
    for parameter in names:
        whole = start[parameter]
        parts = list(whole) if whole.dim() == 3 and name in ("normuon", "mars") else [whole]
        flat += [(parameter, i, torch.nn.Parameter(part.clone())) for i, part in enumerate(parts)]
    decayed = [p for n, _, p in flat if len(SHAPES[n]) > 1]
    plain = [p for n, _, p in flat if len(SHAPES[n]) == 1]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}]
    groups += [{"params": plain, "weight_decay": 0.0}] if plain else []
    if name == "nadam":
        library = torch.optim.NAdam(
            groups, lr=LR, betas=o.betas, eps=o.eps, momentum_decay=o.momentum_decay, decoupled_weight_decay=True
        )
    elif name == "lion":
        library = pytorch_optimizer.Lion(groups, lr=LR, betas=o.betas)
    elif name == "adan":
        library = pytorch_optimizer.Adan(groups, lr=LR, betas=o.betas, eps=o.eps, weight_decouple=True)
    elif name == "mars":
        library = pytorch_optimizer.MARS(groups, lr=LR, betas=o.betas, gamma=o.gamma, eps=o.eps)
    else:
        library = pytorch_optimizer.NorMuon(
            [{"params": decayed, "use_muon": True}],
            lr=LR,
            momentum=o.momentum,
            beta2=o.beta2,
            weight_decay=o.weight_decay,
            update_scale="match_rms",
            eps=o.eps,
        )
    found = []
    for step in range(STEPS):
        given = gradients(step)
        for parameter, i, tensor in flat:
            whole = given[parameter]
            tensor.grad = (whole[i] if tensor.dim() < whole.dim() else whole).clone()
        library.step()
        found.append(
            {
                n: torch.stack([p.detach().clone() for m, _, p in flat if m == n]).view(SHAPES[n])
                for n in dict.fromkeys(n for n, _, _ in flat)
            }
        )
    return found


@pytest.mark.parametrize(("name", "tolerance"), [("nadam", 1e-9), ("lion", 1e-9), ("adan", 1e-6), ("mars", 2e-5)])
def test_equals_a_library(name, tolerance):
    config = small_config(name)
    mine, expected = ours(config), theirs(name, config)
    for step in (0, 1, 9, STEPS - 1):
        for parameter, z in expected[step].items():
            scale = z.abs().max().item()
            np.testing.assert_allclose(
                mine[step][parameter].numpy(), z.numpy(), rtol=0, atol=tolerance * scale, err_msg=parameter
            )


def test_normuon_points_where_a_librarys_does():
    """Its Newton-Schulz works in bfloat16, so directions are compared."""
    config = small_config("normuon", optimizer__weight_decay=0.0)
    mine, expected = ours(config), theirs("normuon", config)
    for step in (3, 10, STEPS - 1):
        for parameter in MATRICES:
            a, b = ((run[step][parameter] - run[step - 1][parameter]).flatten() for run in (mine, expected))
            assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.999, parameter
            assert a.norm() == pytest.approx(b.norm().item(), rel=1e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_zero_gradient_decays_only(name):
    config = small_config(name)
    layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), config.optimizer))
    start = random_tensors(7)
    optimizer = StageOptimizer(layout, list(start.values()), dtype=torch.float64, learning_rate=lambda k: LR)
    published = torch.zeros(layout.size, dtype=torch.float64)
    for _ in range(3):
        optimizer.step(torch.zeros_like(published), scale=1.0, publish=published, lookahead_steps=0)
    for parameter, z in zip(layout.names, layout.views(published), strict=True):
        decay = 0.0 if z.dim() == 1 else config.optimizer.weight_decay
        np.testing.assert_allclose(z.numpy(), ((1 - LR * decay) ** 3 * start[parameter]).numpy(), rtol=1e-12)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (3, 3), (5, 2, 4), (0, 3, 4)])
@pytest.mark.parametrize(
    "rule", [NorMuon(0.95, 5, 0.95, 1e-8), Mars((0.95, 0.99), 1e-8, 0.025), Soap((0.9, 0.95), 1e-8, 1, 1, 4)]
)
def test_any_shape_and_float32(rule, shape):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = grad.clone()
    state = rule.init(torch.zeros(shape))
    for count in (1, 2, 3):  # soap's first update is the second
        moved = rule.direction(grad, state, count=count)
    assert moved.shape == grad.shape and moved.dtype is torch.float32 and moved.isfinite().all()
    assert torch.equal(grad, before), "the gradient is kept or written"
    assert state_elements(rule, shape) == sum(tensor.numel() for tensor in state.values())


@pytest.mark.parametrize("name", ["normuon", "mars", "soap"])
def test_matrices_and_the_rest(name):
    routes = route_parameters(roles_of(SHAPES), small_config(name).optimizer)
    rules = {parameter: type(route.rule).__name__.lower() for parameter, route in routes.items()}
    assert {parameter for parameter, rule in rules.items() if rule == name} == set(MATRICES)
    assert {rule for parameter, rule in rules.items() if parameter not in MATRICES} == {"adamw"}
    assert routes["layers.0.mlp.experts.gate"].role is Role.EXPERTS
    assert "router" in render_routing(routes, SHAPES)


@pytest.mark.parametrize("largest_side", [100, 6])
def test_soap_equals_a_library(largest_side):
    """To 1e-6 before the first step of the bases, 1e-4 after it: the library's QR runs in float32."""
    shapes, steps = {"a": (6, 6), "b": (9, 9), "c": (9, 6)}, 40
    if largest_side == 100:
        del shapes["c"]  # its first R has a null space, whose basis is arbitrary
    rule = Soap((0.95, 0.9), 1e-8, 10, 1, largest_side)
    start, common = random_tensors(1, shapes), random_tensors(2, shapes)
    mine = {n: z.clone() for n, z in start.items()}
    states = {n: rule.init(z[None]) for n, z in mine.items()}
    theirs = {n: torch.nn.Parameter(z.clone()) for n, z in start.items()}
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
    assert all((mine[name] - start[name]).abs().max() > 10 * LR for name in shapes)


EVERY = ["sgd", "adamw", "muon", *OPTIMIZERS, "torch"]


@pytest.mark.parametrize("name", EVERY)
def test_bfloat16_parameters_have_float32_masters_and_states(name):
    """100 updates far below bfloat16's step add up; what is published is z's rounding."""
    config = small_config(name, optimizer__weight_decay=0.0)
    layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), config.optimizer))
    start = {n: torch.ones(s, dtype=torch.bfloat16) for n, s in SHAPES.items()}
    optimizer = StageOptimizer(layout, list(start.values()), dtype=torch.float32, learning_rate=lambda k: 1e-5)
    published = torch.zeros(layout.size, dtype=torch.bfloat16)
    for step in range(100):
        flat = torch.zeros(layout.size)
        for view, grad in zip(layout.views(flat), gradients(step).values(), strict=True):
            view.copy_(grad)
        optimizer.step(flat, scale=1.0, publish=published, lookahead_steps=0)
    assert all(tensor.dtype is torch.float32 for state in optimizer.states for tensor in state.values())
    whole = torch.zeros(layout.size)
    layout.scatter_shard(optimizer.master, whole)
    assert torch.equal(whole.to(torch.bfloat16), published)
    for parameter, z in zip(layout.names, layout.views(whole), strict=True):
        assert 1e-5 < (z - 1).abs().max() < 0.05, parameter


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("chosen", [[], ["layers.0.mlp_norm.weight"], ["layers.0.attention.query.weight"]])
def test_no_matrix_no_vector_and_nothing_at_all(name, chosen):
    shapes = {n: SHAPES[n] for n in chosen}
    layout = FlatParamLayout(shapes, route_parameters(roles_of(shapes), small_config(name).optimizer))
    start = [torch.ones(s, dtype=torch.float64) for s in shapes.values()]
    optimizer = StageOptimizer(layout, start, dtype=torch.float64, learning_rate=lambda k: 0.1)
    published = torch.zeros(layout.size, dtype=torch.float64)
    for _ in range(5):
        optimizer.step(torch.ones(layout.size, dtype=torch.float64), scale=1.0, publish=published, lookahead_steps=1)
    assert optimizer.num_updates == 5
    assert all((view != 1).any() and view.isfinite().all() for view in layout.views(published))
