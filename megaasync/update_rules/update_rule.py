"""Update rules: gradient and state in, direction out. Learning rate and weight decay are added by the stage optimizer.

A rule never sees the weights, never keeps or writes the gradient, and draws no random numbers, so delay and error
feedback work with any of them. The whole step is u = lr (direction + weight_decay z).
"""

from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


class UpdateRule(Protocol):
    """One optimizer's recurrence, on one tensor or a stack of equal matrices."""

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


def state_elements(rule: UpdateRule, shape: tuple[int, ...]) -> int:
    """Numbers of state for parameters of a shape; no memory is taken."""
    return sum(tensor.numel() for tensor in rule.init(torch.empty(shape, device="meta")).values())
