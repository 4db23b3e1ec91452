"""Fifty steps of an optimizer on a few named tensors: by the product, by a direction written by hand, by a library."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaasync.config import Config
from megaasync.models.parameters import roles_of
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import route_parameters
from megaasync.optim.stage_optimizer import StageOptimizer

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
MATRICES = [name for name in SHAPES if "attention" in name or "experts" in name]
LR, STEPS = 0.01, 50

Tensors = dict[str, Tensor]
# (optimizer config, parameter's name, gradient of one matrix or vector, its state, step from 1) -> direction
Direction = Callable[[Any, str, Tensor, dict[str, Tensor], int], Tensor]


def random_tensors(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Tensors:
    """Normal values in float64."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


def gradients(step: int) -> Tensors:
    """Correlated from step to step, as those of a training are; one tensor gets none in the first steps."""
    common, own = random_tensors(1000), random_tensors(step)
    found = {name: common[name] + own[name] for name in SHAPES}
    if step < 3:
        found["layers.1.attention.query.weight"].zero_()
    return found


def start() -> Tensors:
    """The weights that every trajectory begins with."""
    return random_tensors(7)


def ours(config: Config, *, error_feedback: bool = False) -> list[Tensors]:
    """z by name after each step, by the stage optimizer."""
    layout = FlatParamLayout(SHAPES, route_parameters(roles_of(SHAPES), config.optimizer))
    optimizer = StageOptimizer(layout, list(start().values()), dtype=torch.float64, learning_rate=lambda k: LR)
    published, found = torch.zeros(layout.size, dtype=torch.float64), []
    for step in range(STEPS):
        flat = torch.zeros(layout.size, dtype=torch.float64)
        for view, grad in zip(layout.views(flat), gradients(step).values(), strict=True):
            view.copy_(grad)
        optimizer.step(flat, scale=1.0, out=published, lookahead_steps=int(error_feedback))
        whole = torch.zeros_like(flat)
        layout.scatter_shard(optimizer.master, whole)
        found.append({n: v.clone() for n, v in zip(layout.names, layout.views(whole), strict=True)})
    return found


def adamw_by_hand(g: Tensor, s: dict[str, Tensor], t: int, betas: tuple[float, float], eps: float) -> Tensor:
    """AdamW's direction, for optimizers that leave some parameters to it."""
    b1, b2 = betas
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    return s["m"] / (1 - b1**t) / ((s["v"] / (1 - b2**t)).sqrt() + eps)


def assert_equals_by_hand(config: Config, direction: Direction, *, atol: float = 1e-10) -> None:
    """The stage optimizer moves every tensor as a direction written by hand does, expert by expert, at every step."""
    o, z, states = config.optimizer, start(), {}
    for step, mine in enumerate(ours(config)):
        for name, g in gradients(step).items():
            decay = 0.0 if len(SHAPES[name]) == 1 else o.weight_decay
            parts = list(zip(z[name], g, strict=True)) if g.dim() == 3 else [(z[name], g)]
            moved = [
                w - LR * (direction(o, name, part, states.setdefault((name, i), {}), step + 1) + decay * w)
                for i, (w, part) in enumerate(parts)
            ]
            z[name] = torch.stack(moved) if g.dim() == 3 else moved[0]
            where = f"{name} after step {step + 1}"
            np.testing.assert_allclose(mine[name].numpy(), z[name].numpy(), rtol=0, atol=atol, err_msg=where)


def library_run(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    weight_decay: float,
    names: Iterable[str] = SHAPES,
    *,
    one_by_one: bool = False,
) -> list[Tensors]:
    """The trajectory of a library's optimizer.

    Args:
        make: parameter groups to the optimizer; vectors are in a group of their own, without decay.
        weight_decay: of the others.
        names: which parameters it steps.
        one_by_one: each expert is a parameter, for rules of matrices.
    """
    flat = []
    for name in names:
        whole = start()[name]
        parts = list(whole) if whole.dim() == 3 and one_by_one else [whole]
        flat += [(name, i, torch.nn.Parameter(part.clone())) for i, part in enumerate(parts)]
    groups = [{"params": [p for n, _, p in flat if len(SHAPES[n]) > 1], "weight_decay": weight_decay}]
    vectors = [p for n, _, p in flat if len(SHAPES[n]) == 1]
    library = make([*groups, {"params": vectors, "weight_decay": 0.0}] if vectors else groups)
    found = []
    for step in range(STEPS):
        given = gradients(step)
        for name, i, tensor in flat:
            whole = given[name]
            tensor.grad = (whole[i] if tensor.dim() < whole.dim() else whole).clone()
        library.step()
        found.append(
            {
                n: torch.stack([p.detach().clone() for m, _, p in flat if m == n]).view(SHAPES[n])
                for n in dict.fromkeys(n for n, _, _ in flat)
            }
        )
    return found


def assert_equals_library(config: Config, expected: list[Tensors], tolerance: float) -> None:
    """To a tolerance relative to the largest weight, early and late in the run."""
    mine = ours(config)
    for step in (0, 1, 9, STEPS - 1):
        for name, z in expected[step].items():
            scale = z.abs().max().item()
            np.testing.assert_allclose(
                mine[step][name].numpy(), z.numpy(), rtol=0, atol=tolerance * scale, err_msg=name
            )


def assert_only_matrices_take(config: Config, rule: type) -> None:
    """Hidden and expert matrices have a rule, AdamW has the rest."""
    routes = route_parameters(roles_of(SHAPES), config.optimizer)
    assert {name for name, route in routes.items() if isinstance(route.rule, rule)} == set(MATRICES)
    assert {type(routes[name].rule).__name__ for name in SHAPES if name not in MATRICES} == {"AdamW"}
