"""AdamW. t counts absorbed gradients from 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megaasync.fields import Range
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from megaasync.update_rules.update_rule import State


@dataclass(frozen=True, slots=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (arXiv 1711.05101): decoupled weight decay."""

    name: Literal["adamw"]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]

    def rules(self) -> Rules:
        """The same rule for everything."""
        return Rules(AdamW(self.betas, self.eps))


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW (arXiv 1711.05101).

    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; d = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
    """

    betas: tuple[float, float]
    eps: float

    def init(self, like: Tensor) -> State:
        """First and second moments."""
        return {"m": like.new_zeros(like.shape), "v": like.new_zeros(like.shape)}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Bias-corrected Adam direction: torch's fused step, taken on zeros, is the whole of it in one pass."""
        import torch
        from torch.optim.adamw import adamw

        moved = torch.zeros_like(grad)
        adamw(
            [moved],
            [grad],
            [state["m"]],
            [state["v"]],
            [],
            [torch.full((), count - 1.0, device=grad.device)],  # which it counts on
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=-1.0,
            weight_decay=0.0,
            eps=self.eps,
            maximize=False,
        )
        return moved
