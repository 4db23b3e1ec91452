"""Update rules: gradient and state in, direction out. Learning rate and weight decay are added by the stage optimizer.

A rule never sees the weights, never keeps or writes the gradient, and draws no random numbers, so delay and error
feedback work with any of them. The whole step is u = lr (direction + weight_decay z).
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megaasync.optim.newton_schulz import orthogonalize

State = dict[str, Tensor]


class UpdateRule(Protocol):
    """One optimizer's recurrence, on one tensor or a stack of equal matrices.

    Attributes:
        num_states: numbers of state per parameter.
    """

    num_states: int

    def init(self, like: Tensor) -> State:
        """Zero state for parameters shaped as `like`; every tensor of it shares the first dimension of `like`."""

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Absorb a gradient into `state`, in place.

        Args:
            grad: the gradient, scaled and clipped.
            state: from `init`.
            count: gradients absorbed by then, this one included; from 1.

        Returns:
            The direction, a new tensor shaped as `grad`.
        """


@dataclass(frozen=True, slots=True)
class Sgd:
    """d = g."""

    num_states = 0

    def init(self, like: Tensor) -> State:
        """No state."""
        return {}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """The gradient itself."""
        return grad.clone()


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW (arXiv 1711.05101).

    m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; d = (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps).
    """

    betas: tuple[float, float]
    eps: float
    num_states = 2

    def init(self, like: Tensor) -> State:
        """First and second moments."""
        return {"m": torch.zeros_like(like), "v": torch.zeros_like(like)}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Bias-corrected Adam direction."""
        beta1, beta2 = self.betas
        state["m"].lerp_(grad, 1 - beta1)
        state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["v"] / (1 - beta2**count)).sqrt_().add_(self.eps)
        return (state["m"] / (1 - beta1**count)).div_(denominator)


@dataclass(frozen=True, slots=True)
class Muon:
    """m = mu m + (1-mu) g; n = (1-mu) g + mu m; d = 0.2 sqrt(max(rows, cols)) NewtonSchulz(n) (Moonlight's scale).

    The scale gives d the root mean square of an AdamW direction, so one lr and one decay serve both.
    """

    momentum: float
    newton_schulz_steps: int
    num_states = 1

    def init(self, like: Tensor) -> State:
        """Momentum."""
        return {"m": torch.zeros_like(like)}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Orthogonalised Nesterov momentum of matrices [..., rows, cols]."""
        state["m"].lerp_(grad, 1 - self.momentum)
        nesterov = torch.lerp(grad, state["m"], self.momentum)
        scale = 0.2 * math.sqrt(max(grad.shape[-2:]))
        return orthogonalize(nesterov, steps=self.newton_schulz_steps).mul_(scale)
