"""Rules that take each element by itself: sgd, adamw, nadam, lion, adan. t counts absorbed gradients from 1."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megaasync.optim.update_rule import State


@dataclass(frozen=True, slots=True)
class Sgd:
    """d = (1-mu) g + mu m with m = mu m + (1-mu) g, Nesterov's form as Muon's; without momentum d = g."""

    momentum: float = 0.0

    def init(self, like: Tensor) -> State:
        """Momentum, if there is one."""
        return {"m": torch.zeros_like(like)} if self.momentum else {}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """The gradient itself, or with what the momentum adds."""
        if not self.momentum:
            return grad.clone()
        state["m"].lerp_(grad, 1 - self.momentum)
        return torch.lerp(grad, state["m"], self.momentum)


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW (arXiv 1711.05101).

    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; d = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
    """

    betas: tuple[float, float]
    eps: float

    def init(self, like: Tensor) -> State:
        """First and second moments."""
        return {"m": torch.zeros_like(like), "v": torch.zeros_like(like)}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Bias-corrected Adam direction: torch's fused step, taken on zeros, is the whole of it in one pass."""
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
        return {"m": torch.zeros_like(like), "v": torch.zeros_like(like)}

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


@dataclass(frozen=True, slots=True)
class Lion:
    """Lion (arXiv 2302.06675): d = sign(b1 m + (1-b1) g), then m = b2 m + (1-b2) g; sign(0) = 0."""

    betas: tuple[float, float]

    def init(self, like: Tensor) -> State:
        """Momentum."""
        return {"m": torch.zeros_like(like)}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Signs."""
        beta1, beta2 = self.betas
        signs = torch.lerp(grad, state["m"], beta1).sign_()
        state["m"].lerp_(grad, 1 - beta2)
        return signs


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
        return {name: torch.zeros_like(like) for name in ("m", "q", "n", "previous")}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Nesterov-estimated direction."""
        beta1, beta2, beta3 = self.betas
        change = grad - state["previous"] if count > 1 else torch.zeros_like(grad)
        state["previous"].copy_(grad)
        state["m"].lerp_(grad, 1 - beta1)
        state["q"].lerp_(change, 1 - beta2)
        ahead = change.mul_(beta2).add_(grad)
        state["n"].mul_(beta3).addcmul_(ahead, ahead, value=1 - beta3)
        denominator = (state["n"] / (1 - beta3**count)).sqrt_().add_(self.eps)
        moved = state["m"] / (1 - beta1**count)
        return moved.add_(state["q"], alpha=beta2 / (1 - beta2**count)).div_(denominator)
