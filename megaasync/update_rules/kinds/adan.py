"""Adan. t counts absorbed gradients from 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megaasync.fields import Range
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from megaasync.update_rules.update_rule import State


@dataclass(frozen=True, slots=True)
class AdanConfig(OptimizerConfig):
    """Adan (arXiv 2208.06677) with decoupled decay."""

    name: Literal["adan"]
    betas: Annotated[tuple[float, float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]

    def rules(self) -> Rules:
        """The same rule for everything."""
        return Rules(Adan(self.betas, self.eps))


@dataclass(frozen=True, slots=True)
class Adan:
    """Adan (arXiv 2208.06677) with decoupled decay (its `no_prox` form).

    D = g - g_prev, D_1 = 0; m = b1 m + (1-b1) g; q = b2 q + (1-b2) D; n = b3 n + (1-b3) (g + b2 D)^2;
    d = (m / (1-b1^t) + b2 q / (1-b2^t)) / (sqrt(n / (1-b3^t)) + eps). g_prev is the gradient absorbed before, under any
    delay.
    """

    betas: tuple[float, float, float]
    eps: float

    def init(self, like: Tensor) -> State:
        """Moments of the gradient, of its change, of both squared, and the gradient before."""
        return {name: like.new_zeros(like.shape) for name in ("m", "q", "n", "previous")}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Nesterov-estimated direction."""
        beta1, beta2, beta3 = self.betas
        change = grad - state["previous"] if count > 1 else grad.new_zeros(grad.shape)
        state["previous"].copy_(grad)
        state["m"].lerp_(grad, 1 - beta1)
        state["q"].lerp_(change, 1 - beta2)
        ahead = change.mul_(beta2).add_(grad)
        state["n"].mul_(beta3).addcmul_(ahead, ahead, value=1 - beta3)
        denominator = (state["n"] / (1 - beta3**count)).sqrt_().add_(self.eps)
        moved = state["m"] / (1 - beta1**count)
        return moved.add_(state["q"], alpha=beta2 / (1 - beta2**count)).div_(denominator)
