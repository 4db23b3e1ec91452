"""Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megaasync.fields import Range
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from megaasync.update_rules.update_rule import State


@dataclass(frozen=True, slots=True)
class LionConfig(OptimizerConfig):
    """Lion (arXiv 2302.06675): wants an lr 3 to 10 times smaller than AdamW's and as much more decay."""

    name: Literal["lion"]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]

    def rules(self) -> Rules:
        """The same rule for everything."""
        return Rules(Lion(self.betas))


@dataclass(frozen=True, slots=True)
class Lion:
    """Lion (arXiv 2302.06675): d = sign(b1 m + (1-b1) g), then m = b2 m + (1-b2) g; sign(0) = 0."""

    betas: tuple[float, float]

    def init(self, like: Tensor) -> State:
        """Momentum."""
        return {"m": like.new_zeros(like.shape)}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Signs."""
        beta1, beta2 = self.betas
        signs = grad.lerp(state["m"], beta1).sign_()
        state["m"].lerp_(grad, 1 - beta2)
        return signs
