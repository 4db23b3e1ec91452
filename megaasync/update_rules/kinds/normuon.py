"""NorMuon for hidden and expert matrices, AdamW for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megaasync.fields import Range
from megaasync.update_rules.kinds.adamw import AdamW
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from megaasync.update_rules.update_rule import State


@dataclass(frozen=True, slots=True)
class NorMuonConfig(OptimizerConfig):
    """NorMuon (arXiv 2510.05491) for matrices, AdamW for the rest.

    Attributes:
        momentum, newton_schulz_steps, newton_schulz_precision: as muon's.
        beta2: of the second moment of the rows.
        betas, eps: of AdamW; eps also of the rows.
    """

    name: Literal["normuon"]
    momentum: Annotated[float, Range(at_least=0, below=1)]
    newton_schulz_steps: Annotated[int, Range(at_least=1)]
    newton_schulz_precision: Literal["auto", "float32", "bfloat16"]
    beta2: Annotated[float, Range(at_least=0, below=1)]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]

    def rules(self) -> Rules:
        """NorMuon for matrices, AdamW for the rest."""
        matrix = NorMuon(self.momentum, self.newton_schulz_steps, self.beta2, self.eps, self.newton_schulz_precision)
        return Rules(AdamW(self.betas, self.eps), matrix)


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
    newton_schulz_precision: Literal["auto", "float32", "bfloat16"] = "auto"

    def init(self, like: Tensor) -> State:
        """Momentum, and a second moment per row."""
        return {"m": like.new_zeros(like.shape), "v": like.new_zeros((*like.shape[:-1], 1))}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Orthogonalised Nesterov momentum with normalised rows; a zero gradient from the start gives zero."""
        import torch

        from megaasync.update_rules.newton_schulz import orthogonalize

        state["m"].lerp_(grad, 1 - self.momentum)
        nesterov = grad.lerp(state["m"], self.momentum)
        moved = orthogonalize(nesterov, steps=self.newton_schulz_steps, precision=self.newton_schulz_precision)
        state["v"].lerp_(moved.square().mean(dim=-1, keepdim=True), 1 - self.beta2)
        moved = moved / (state["v"].sqrt() + self.eps)
        size = torch.linalg.matrix_norm(moved, keepdim=True).clamp_min(torch.finfo(moved.dtype).tiny)
        return moved.mul_(0.2 * math.sqrt(grad.shape[-2] * grad.shape[-1])).div_(size)
