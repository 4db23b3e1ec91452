"""Linear layers whose weight gradients can wait: the second half (W) of a split backward (arXiv 2401.10241).

A layer with a queue computes only its input gradient during a backward that is collected, and leaves the weight
gradient as work for later. Without a queue, or outside a collection, it is an ordinary linear layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.kernels.grouped_linear import grouped_linear, grouped_weight_gradient

Deferred = list[tuple[Tensor, Callable[[], Tensor]]]


class WeightGradientQueue:
    """Where a stage's layers leave the weight gradients of one microbatch."""

    def __init__(self) -> None:
        self._collected: Deferred | None = None

    @property
    def is_open(self) -> bool:
        """Whether layers should leave their weight gradients here."""
        return self._collected is not None

    def add(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        """Leave a weight and how to compute its gradient."""
        self._collected.append((weight, compute))

    @contextmanager
    def collect(self) -> Iterator[Deferred]:
        """Collect what the backward inside leaves."""
        self._collected = collected = []
        try:
            yield collected
        finally:
            self._collected = None


def accumulate(deferred: Deferred) -> None:
    """Compute the gradients that were left, and add them to the weights' gradients as autograd would."""
    for weight, compute in deferred:
        torch.autograd.backward(weight, compute())


def use_queue(module: nn.Module, queue: WeightGradientQueue) -> None:
    """Give the queue to every layer in a module that can use one."""
    for layer in module.modules():
        if hasattr(layer, "weight_gradients"):
            layer.weight_gradients = queue


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight_OI: Tensor, queue: WeightGradientQueue) -> Tensor:  # noqa: ANN001 - torch's
        ctx.save_for_backward(x, weight_OI)
        ctx.queue = queue
        return F.linear(x, weight_OI)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN001 - torch's
        x, weight_OI = ctx.saved_tensors

        def weight_gradient() -> Tensor:
            return grad.flatten(0, -2).T @ x.flatten(0, -2)

        x_grad = grad @ weight_OI if ctx.needs_input_grad[0] else None
        if not ctx.queue.is_open:
            return x_grad, weight_gradient(), None
        ctx.queue.add(weight_OI, weight_gradient)
        return x_grad, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, queue: WeightGradientQueue) -> Tensor:  # noqa: ANN001
        ctx.save_for_backward(x_RI, weight_EOI, counts_E)
        ctx.queue = queue
        return grouped_linear(x_RI, weight_EOI, counts_E)

    @staticmethod
    def backward(ctx, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN001
        x_RI, weight_EOI, counts_E = ctx.saved_tensors

        def weight_gradient() -> Tensor:
            return grouped_weight_gradient(grad_RO, x_RI, counts_E)

        x_grad = grouped_linear(grad_RO, weight_EOI.transpose(1, 2), counts_E) if ctx.needs_input_grad[0] else None
        if not ctx.queue.is_open:
            return x_grad, weight_gradient(), None, None
        ctx.queue.add(weight_EOI, weight_gradient)
        return x_grad, None, None, None


def linear(x: Tensor, weight_OI: Tensor, queue: WeightGradientQueue | None) -> Tensor:
    """x W^T; [..., I] to [..., O]."""
    return F.linear(x, weight_OI) if queue is None else _Linear.apply(x, weight_OI, queue)


def expert_linear(x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, queue: WeightGradientQueue | None) -> Tensor:
    """As `grouped_linear`."""
    if queue is None:
        return grouped_linear(x_RI, weight_EOI, counts_E)
    return _GroupedLinear.apply(x_RI, weight_EOI, counts_E, queue)
