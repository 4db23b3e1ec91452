"""Muon for hidden and expert matrices, AdamW for the rest."""

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
class MuonConfig(OptimizerConfig):
    """Muon for matrices, AdamW for the rest, one lr for both through the 0.2 sqrt(max(rows, cols)) scale.

    Attributes:
        momentum: mu of the moving average, Nesterov form.
        newton_schulz_steps: iterations of the orthogonalisation.
        newton_schulz_precision: of its products; `auto` is bfloat16 on GPUs, unless the run is in float64.
        betas, eps: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["muon"]
    momentum: Annotated[float, Range(at_least=0, below=1)]
    newton_schulz_steps: Annotated[int, Range(at_least=1)]
    newton_schulz_precision: Literal["auto", "float32", "bfloat16"]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]

    def rules(self) -> Rules:
        """Muon for matrices, AdamW for the rest."""
        matrix = Muon(self.momentum, self.newton_schulz_steps, self.newton_schulz_precision)
        return Rules(AdamW(self.betas, self.eps), matrix)


@dataclass(frozen=True, slots=True)
class Muon:
    """m = mu m + (1-mu) g; n = (1-mu) g + mu m; d = 0.2 sqrt(max(rows, cols)) NewtonSchulz(n) (Moonlight's scale).

    The scale gives d the root mean square of an AdamW direction, so one lr and one decay serve both.
    """

    momentum: float
    newton_schulz_steps: int
    newton_schulz_precision: Literal["auto", "float32", "bfloat16"] = "auto"

    def init(self, like: Tensor) -> State:
        """Momentum."""
        return {"m": like.new_zeros(like.shape)}

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Orthogonalised Nesterov momentum of matrices [..., rows, cols]."""
        from megaasync.update_rules.newton_schulz import orthogonalize

        state["m"].lerp_(grad, 1 - self.momentum)
        nesterov = grad.lerp(state["m"], self.momentum)
        scale = 0.2 * math.sqrt(max(grad.shape[-2:]))
        moved = orthogonalize(nesterov, steps=self.newton_schulz_steps, precision=self.newton_schulz_precision)
        return moved.mul_(scale)
