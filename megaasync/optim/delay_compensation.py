"""Taylor compensation of a delayed gradient (DC-ASGD, arXiv 1609.08326), a baseline of the paper.

g(w_now) is about g + lambda g g (w_now - w_then), element by element: the square stands for the Hessian's diagonal.
w_then are the weights that the gradient was taken at, w_now the newest published ones; g is averaged and clipped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaasync.update_rules.update_rule import State

_MEMORY = 0.95  # of the mean square, as in the paper's experiments
_EPSILON = 1e-7


@dataclass(frozen=True, slots=True)
class DelayCompensation:
    """Fixed strength lambda, or adaptive: lambda / sqrt(mean square of g)."""

    strength: float
    is_adaptive: bool

    def init(self, like: Tensor) -> State:
        """The mean square, if it is adaptive."""
        return {"mean_square": torch.zeros_like(like)} if self.is_adaptive else {}

    def apply_(self, grad: Tensor, state: State, *, now: Tensor, then: Tensor) -> None:
        """Compensate a gradient, in place.

        Args:
            grad: in at least float32.
            state: from `init`, shaped alike.
            now: the newest weights, in the compute dtype.
            then: the weights that the gradient was taken at.
        """
        squares = grad.square()
        if self.is_adaptive:
            state["mean_square"].lerp_(squares, 1 - _MEMORY)
            squares.div_((state["mean_square"] + _EPSILON).sqrt_())
        grad.addcmul_(squares, now.to(grad.dtype) - then.to(grad.dtype), value=self.strength)
