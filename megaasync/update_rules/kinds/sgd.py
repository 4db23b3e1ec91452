"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megaasync.fields import Range
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from megaasync.update_rules.update_rule import State


@dataclass(frozen=True, slots=True)
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent, for checks: u = lr (g + weight_decay z); `momentum` mu as Muon's, 0 for none."""

    name: Literal["sgd"]
    momentum: Annotated[float, Range(at_least=0, below=1)]

    def rules(self) -> Rules:
        """The same rule for everything."""
        return Rules(Sgd(self.momentum))


@dataclass(frozen=True, slots=True)
class Sgd:
    """d = (1-mu) g + mu m with m = mu m + (1-mu) g, Nesterov's form as Muon's; without momentum d = g."""

    momentum: float = 0.0

    def init(self, like: Tensor) -> State:
        """Momentum, if there is one."""
        return {"m": like.new_zeros(like.shape)} if self.momentum else {}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """The gradient itself, or with what the momentum adds."""
        if not self.momentum:
            return grad.clone()
        state["m"].lerp_(grad, 1 - self.momentum)
        return grad.lerp(state["m"], self.momentum)
