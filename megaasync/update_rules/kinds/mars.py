"""MARS-AdamW for hidden and expert matrices, AdamW for the rest. t counts absorbed gradients from 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megaasync.fields import Range
from megaasync.update_rules.kinds.adamw import AdamW
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from megaasync.update_rules.update_rule import State


@dataclass(frozen=True, slots=True)
class MarsConfig(OptimizerConfig):
    """MARS-AdamW (arXiv 2411.10438) for matrices, AdamW for the rest.

    Attributes:
        betas: of the corrected gradient.
        gamma: strength of the correction by the gradient before.
        adamw_betas: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["mars"]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    gamma: Annotated[float, Range(at_least=0)]
    adamw_betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]

    def rules(self) -> Rules:
        """MARS for matrices, AdamW for the rest."""
        return Rules(AdamW(self.adamw_betas, self.eps), Mars(self.betas, self.eps, self.gamma))


@dataclass(frozen=True, slots=True)
class Mars:
    """MARS-AdamW (arXiv 2411.10438), the approximate form: variance reduction by the gradient absorbed before.

    c = g + gamma b1 / (1-b1) (g - g_prev), g_prev = 0 at first; a matrix c of norm above 1 is divided by it; m, v and d
    as AdamW's of c. A matrix rule because of that norm. The exact form needs a second backward at the weights before.
    """

    betas: tuple[float, float]
    eps: float
    gamma: float

    def init(self, like: Tensor) -> State:
        """Moments of c, and the gradient before."""
        return {name: like.new_zeros(like.shape) for name in ("m", "v", "previous")}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Bias-corrected Adam direction of the corrected gradient."""
        import torch

        beta1, beta2 = self.betas
        corrected = torch.sub(grad, state["previous"]).mul_(self.gamma * beta1 / (1 - beta1)).add_(grad)
        state["previous"].copy_(grad)
        corrected.div_(torch.linalg.matrix_norm(corrected, keepdim=True).clamp_min(1.0))
        state["m"].lerp_(corrected, 1 - beta1)
        state["v"].mul_(beta2).addcmul_(corrected, corrected, value=1 - beta2)
        denominator = (state["v"] / (1 - beta2**count)).sqrt_().add_(self.eps)
        return (state["m"] / (1 - beta1**count)).div_(denominator)
