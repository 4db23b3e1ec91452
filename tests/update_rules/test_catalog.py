"""What holds for every optimizer of the catalog, a new one included, and what each must have."""

import copy
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from megaasync.models.parameters import roles_of
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import route_parameters
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.update_rules import OPTIMIZERS
from megaasync.update_rules.catalog import _config_class
from megaasync.update_rules.update_rule import state_elements
from tests.support.configs import small_config
from tests.support.trajectories import LR, SHAPES, gradients, start

ROOT = Path(__file__).parents[2]


def test_every_module_has_one_optimizer():
    modules = {kind.__module__.rpartition(".")[2] for kind in OPTIMIZERS.values()}
    assert {path.stem for path in (ROOT / "megaasync/update_rules/kinds").glob("*.py")} == {*modules, "__init__"}
    with pytest.raises(TypeError, match="defines 0 subclasses of OptimizerConfig"):
        _config_class(import_module("megaasync.update_rules.newton_schulz"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_its_tests_and_its_yaml(name):
    """What one has to add to a new one."""
    module = OPTIMIZERS[name].__module__.rpartition(".")[2]
    assert (ROOT / f"tests/update_rules/kinds/test_{module}.py").exists()
    assert (ROOT / f"hydra_configs/optimizer/{name}.yaml").exists()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_zero_gradient_decays_only(name):
    config = small_config(name)
    layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), config.optimizer))
    optimizer = StageOptimizer(layout, list(start().values()), dtype=torch.float64, learning_rate=lambda k: LR)
    published = torch.zeros(layout.size, dtype=torch.float64)
    for _ in range(3):
        optimizer.step(torch.zeros_like(published), scale=1.0, out=published, lookahead_steps=0)
    for parameter, z in zip(layout.names, layout.views(published), strict=True):
        decay = 0.0 if z.dim() == 1 else config.optimizer.weight_decay
        np.testing.assert_allclose(z.numpy(), ((1 - LR * decay) ** 3 * start()[parameter]).numpy(), rtol=1e-12)


def rules_and_shapes():
    """Every rule that the catalog's optimizers use, on shapes that it must take."""
    for name in OPTIMIZERS:
        rules = small_config(name).optimizer.rules()
        for shape in [(7,), (0,)]:
            yield pytest.param(rules.elements, shape, id=f"{name}-{shape}")
        for shape in [(1, 7), (7, 1), (3, 3), (5, 2, 4), (0, 3, 4)] if rules.matrices else []:
            stack = shape if len(shape) == 3 else (1, *shape)
            yield pytest.param(rules.matrices, stack, id=f"{name}-{stack}")


@pytest.mark.parametrize(("rule", "shape"), rules_and_shapes())
def test_a_rule_takes_any_shape_and_keeps_no_gradient(rule, shape):
    """Its state can be split along the first dimension, and another rule goes on from it with the same directions."""
    grads = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    before = [grad.clone() for grad in grads]
    state = rule.init(torch.zeros(shape))
    assert state_elements(rule, shape) == sum(tensor.numel() for tensor in state.values())
    assert all(tensor.shape[0] == shape[0] for tensor in state.values())
    arguments = {"weights": torch.ones(shape), "lr": 0.1} if getattr(rule, "sees_weights", False) else {}
    fresh, resumed = copy.deepcopy(rule), None
    for count, grad in enumerate(grads, start=1):
        moved = rule.direction(grad, state, count=count, **arguments)
        assert moved.shape == grad.shape and moved.dtype is torch.float32 and moved.isfinite().all()
        if resumed is not None:  # a rule that has seen nothing of the first three
            assert torch.equal(fresh.direction(grad, resumed, count=count, **arguments), moved)
        elif count == 3:
            resumed = copy.deepcopy(state)
    assert all(map(torch.equal, grads, before)), "a gradient is written to"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16_parameters_have_float32_masters_and_states(name):
    """100 updates far below bfloat16's step add up; what is published is z's rounding."""
    config = small_config(name, optimizer__weight_decay=0.0)
    layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), config.optimizer))
    ones = {n: torch.ones(s, dtype=torch.bfloat16) for n, s in SHAPES.items()}
    optimizer = StageOptimizer(layout, list(ones.values()), dtype=torch.float32, learning_rate=lambda k: 1e-5)
    published = torch.zeros(layout.size, dtype=torch.bfloat16)
    for step in range(100):
        flat = torch.zeros(layout.size)
        for view, grad in zip(layout.views(flat), gradients(step).values(), strict=True):
            view.copy_(grad)
        optimizer.step(flat, scale=1.0, out=published, lookahead_steps=0)
    assert all(tensor.dtype is torch.float32 for state in optimizer.states for tensor in state.values())
    whole = torch.zeros(layout.size)
    layout.scatter_shard(optimizer.master, whole)
    assert torch.equal(whole.to(torch.bfloat16), published)
    for parameter, z in zip(layout.names, layout.views(whole), strict=True):
        assert 1e-5 < (z - 1).abs().max() < 0.05, parameter


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("chosen", [[], ["layers.0.mlp_norm.weight"], ["layers.0.attention.query.weight"]])
def test_no_matrix_no_vector_and_nothing_at_all(name, chosen):
    shapes = {n: SHAPES[n] for n in chosen}
    layout = FlatParamLayout(shapes, route_parameters(roles_of(shapes), small_config(name).optimizer))
    ones = [torch.ones(s, dtype=torch.float64) for s in shapes.values()]
    optimizer = StageOptimizer(layout, ones, dtype=torch.float64, learning_rate=lambda k: 0.1)
    published = torch.zeros(layout.size, dtype=torch.float64)
    for _ in range(5):
        optimizer.step(torch.ones(layout.size, dtype=torch.float64), scale=1.0, out=published, lookahead_steps=1)
    assert optimizer.num_updates == 5
    assert all((view != 1).any() and view.isfinite().all() for view in layout.views(published))
