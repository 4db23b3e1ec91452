"""NAdam. t counts absorbed gradients from 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from megaasync.fields import Range
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from megaasync.update_rules.update_rule import State


@dataclass(frozen=True, slots=True)
class NAdamConfig(OptimizerConfig):
    """NAdam: AdamW with a momentum that looks ahead; `momentum_decay` as torch's, 0.004 there."""

    name: Literal["nadam"]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]
    momentum_decay: Annotated[float, Range(at_least=0)]

    def rules(self) -> Rules:
        """The same rule for everything."""
        return Rules(NAdam(self.betas, self.eps, self.momentum_decay))


class _RunningProduct:
    """f(1) ... f(n), one factor at a time as n grows; from the start again when it does not, as after a resume."""

    __slots__ = ("_count", "_value")

    def __init__(self) -> None:
        self._count, self._value = 0, 1.0

    def up_to(self, count: int, factor: Callable[[int], float]) -> float:
        """The product of the first `count` factors."""
        if count < self._count:
            self._count, self._value = 0, 1.0
        while self._count < count:
            self._count += 1
            self._value *= factor(self._count)
        return self._value


@dataclass(frozen=True, slots=True)
class NAdam:
    """NAdam (Dozat 2016) as torch has it: AdamW whose momentum looks one step ahead.

    mu_t = b1 (1 - 0.5 0.96^(t momentum_decay)), M_t = mu_1 ... mu_t; m, v as AdamW's;
    d = ((1 - mu_t) g / (1 - M_t) + mu_{t+1} m / (1 - M_t mu_{t+1})) / (sqrt(v / (1 - b2^t)) + eps).
    """

    betas: tuple[float, float]
    eps: float
    momentum_decay: float
    _product: _RunningProduct = field(default_factory=_RunningProduct, compare=False, repr=False)

    def init(self, like: Tensor) -> State:
        """First and second moments."""
        return {"m": like.new_zeros(like.shape), "v": like.new_zeros(like.shape)}

    def _mu(self, count: int) -> float:
        return self.betas[0] * (1 - 0.5 * 0.96 ** (count * self.momentum_decay))

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Bias-corrected look-ahead direction."""
        beta1, beta2 = self.betas
        mu, mu_next, product = self._mu(count), self._mu(count + 1), self._product.up_to(count, self._mu)
        state["m"].lerp_(grad, 1 - beta1)
        state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["v"] / (1 - beta2**count)).sqrt_().add_(self.eps)
        ahead = grad * ((1 - mu) / (1 - product))
        return ahead.add_(state["m"], alpha=mu_next / (1 - product * mu_next)).div_(denominator)
