"""Rules that take whole matrices [..., rows, cols]: muon, normuon, mars. t counts absorbed gradients from 1."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megaasync.optim.newton_schulz import Precision, orthogonalize
from megaasync.optim.update_rule import State


@dataclass(frozen=True, slots=True)
class Muon:
    """m = mu m + (1-mu) g; n = (1-mu) g + mu m; d = 0.2 sqrt(max(rows, cols)) NewtonSchulz(n) (Moonlight's scale).

    The scale gives d the root mean square of an AdamW direction, so one lr and one decay serve both.
    """

    momentum: float
    newton_schulz_steps: int
    newton_schulz_precision: Precision = "auto"

    def init(self, like: Tensor) -> State:
        """Momentum."""
        return {"m": torch.zeros_like(like)}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Orthogonalised Nesterov momentum of matrices [..., rows, cols]."""
        state["m"].lerp_(grad, 1 - self.momentum)
        nesterov = torch.lerp(grad, state["m"], self.momentum)
        scale = 0.2 * math.sqrt(max(grad.shape[-2:]))
        moved = orthogonalize(nesterov, steps=self.newton_schulz_steps, precision=self.newton_schulz_precision)
        return moved.mul_(scale)


@dataclass(frozen=True, slots=True)
class NorMuon:
    """NorMuon (arXiv 2510.05491): Muon's O with its rows brought to equal size over time.

    O as Muon's; v = b2 v + (1-b2) mean over columns of O^2, one number per row; O / (sqrt(v) + eps), scaled so that its
    root mean square is 0.2, which is what Muon's scale gives on average.
    """

    momentum: float
    newton_schulz_steps: int
    beta2: float
    eps: float
    newton_schulz_precision: Precision = "auto"

    def init(self, like: Tensor) -> State:
        """Momentum, and a second moment per row."""
        return {"m": torch.zeros_like(like), "v": like.new_zeros((*like.shape[:-1], 1))}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Orthogonalised Nesterov momentum with normalised rows; a zero gradient from the start gives zero."""
        state["m"].lerp_(grad, 1 - self.momentum)
        nesterov = torch.lerp(grad, state["m"], self.momentum)
        moved = orthogonalize(nesterov, steps=self.newton_schulz_steps, precision=self.newton_schulz_precision)
        state["v"].lerp_(moved.square().mean(dim=-1, keepdim=True), 1 - self.beta2)
        moved = moved / (state["v"].sqrt() + self.eps)
        size = torch.linalg.matrix_norm(moved, keepdim=True).clamp_min(torch.finfo(moved.dtype).tiny)
        return moved.mul_(0.2 * math.sqrt(grad.shape[-2] * grad.shape[-1])).div_(size)


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
        return {name: torch.zeros_like(like) for name in ("m", "v", "previous")}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Bias-corrected Adam direction of the corrected gradient."""
        beta1, beta2 = self.betas
        corrected = torch.sub(grad, state["previous"]).mul_(self.gamma * beta1 / (1 - beta1)).add_(grad)
        state["previous"].copy_(grad)
        corrected.div_(torch.linalg.matrix_norm(corrected, keepdim=True).clamp_min(1.0))
        state["m"].lerp_(corrected, 1 - beta1)
        state["v"].mul_(beta2).addcmul_(corrected, corrected, value=1 - beta2)
        denominator = (state["v"] / (1 - beta2**count)).sqrt_().add_(self.eps)
        return (state["m"] / (1 - beta1**count)).div_(denominator)
