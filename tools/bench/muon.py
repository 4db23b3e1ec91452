"""Muon's step over one rank's matrices, ours against a loop over the matrices."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from megaasync.config.schema import ModelConfig
from megaasync.models.parameters import roles_of
from megaasync.models.transformer import stage_shapes
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import Role, route_parameters
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.update_rules.kinds.muon import MuonConfig
from megaasync.update_rules.newton_schulz import KELLER

CONFIG = MuonConfig("muon", 0.004, 0.1, 0.95, 5, "auto", (0.9, 0.95), 1e-8)


def matrix_shapes(model: ModelConfig, layers: range, *, at_most: int | None = None) -> dict[str, tuple[int, ...]]:
    """The hidden and expert matrices of some layers, by name."""
    shapes = stage_shapes(model, layers)
    routes = route_parameters(roles_of(shapes), CONFIG)
    names = [name for name in shapes if routes[name].role in (Role.MATRIX, Role.EXPERTS)]
    return {name: shapes[name] for name in names[:at_most]}


class OurStep:
    """A stage's optimizer on random weights and gradients."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        layout = FlatParamLayout(shapes, route_parameters(roles_of(shapes), CONFIG))
        draw = torch.Generator(device).manual_seed(0)
        self.weights = [torch.randn(shape, generator=draw, device=device) for shape in shapes.values()]
        self.optimizer = StageOptimizer(layout, self.weights, dtype=torch.float32, learning_rate=lambda _: CONFIG.lr)
        self.gradient = torch.randn(layout.size, generator=draw, device=device)
        self.published = torch.empty(layout.size, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.published = self.published.to(device)

    def __call__(self) -> None:
        """One step."""
        self.optimizer.step(self.gradient, scale=1.0, out=self.published, lookahead_steps=0)

    def masters(self) -> list[Tensor]:
        """z of each matrix."""
        flat = torch.zeros(self.optimizer.layout.size, device=self.published.device)
        self.optimizer.layout.scatter_shard(self.optimizer.master, flat)
        return self.optimizer.layout.views(flat)


def newton_schulz(matrix: Tensor, *, steps: int) -> Tensor:
    """The iteration as it is written down, on one matrix."""
    a, b, c = KELLER
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class LoopStep:
    """The same update, matrix by matrix, of the same weights and gradients."""

    def __init__(self, ours: OurStep) -> None:
        self.weights = [matrix.clone() for whole in ours.weights for matrix in whole.view(-1, *whole.shape[-2:])]
        views = ours.optimizer.layout.views(ours.gradient)
        self.gradients = [matrix.clone() for whole in views for matrix in whole.view(-1, *whole.shape[-2:])]
        self._moments = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def __call__(self) -> None:
        """One step."""
        for weight, grad, moment in zip(self.weights, self.gradients, self._moments, strict=True):
            moment.mul_(CONFIG.momentum).add_(grad, alpha=1 - CONFIG.momentum)
            nesterov = grad * (1 - CONFIG.momentum) + moment * CONFIG.momentum
            update = newton_schulz(nesterov, steps=CONFIG.newton_schulz_steps) * (0.2 * max(weight.shape) ** 0.5)
            weight.mul_(1 - CONFIG.lr * CONFIG.weight_decay).sub_(update, alpha=CONFIG.lr)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds: of each round, ours and the loop's; and how far the weights are apart after the same steps, relative."""

    ours: tuple[float, ...]
    loop: tuple[float, ...]
    apart: float

    @property
    def ratio(self) -> float:
        """The loop's over ours, median of the rounds."""
        return statistics.median(b / a for a, b in zip(self.ours, self.loop, strict=True))


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call."""
    start = perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def compare(shapes: dict[str, tuple[int, ...]], *, rounds: int, device: torch.device) -> StepTimes:
    """Both, in turn."""
    ours = OurStep(shapes, device)
    loop = LoopStep(ours)
    pairs: Sequence[tuple[float, float]] = [(timed(ours, device), timed(loop, device)) for _ in range(rounds + 1)]
    masters = [matrix for whole in ours.masters() for matrix in whole.reshape(-1, *whole.shape[-2:])]
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(masters, loop.weights, strict=True))
    mine, theirs = zip(*pairs[1:], strict=True)
    return StepTimes(mine, theirs, apart)
