"""Linear layers whose weight gradients go straight into the sums of their step, at once or later.

A weight with a `main_grad`, as the engine gives it before a backward, has its gradient added there in place, under
bfloat16 in float32; on a GPU without apex that product is made first, one matrix at a time. A weight without gets an
ordinary `.grad`.

Where a split backward (arXiv 2401.10241) is collected by a queue, a layer computes only its input gradient and leaves
the weight gradient as work for later.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.kernels.grouped_linear import add_grouped_product_, grouped_linear, grouped_product

DeferredWgrads = list[Callable[[], None]]


class WeightGradientQueue:
    """Where a stage's layers leave the weight gradients of one microbatch."""

    def __init__(self) -> None:
        self._collected: DeferredWgrads | None = None

    @property
    def is_open(self) -> bool:
        """Whether layers should leave their weight gradients here."""
        return self._collected is not None

    def add(self, compute: Callable[[], None]) -> None:
        """Leave what computes a gradient and adds it to its weight's."""
        self._collected.append(compute)

    @contextmanager
    def collect(self) -> Iterator[DeferredWgrads]:
        """Collect what the backward inside leaves."""
        self._collected = collected = []
        try:
            yield collected
        finally:
            self._collected = None


@torch.no_grad()
def accumulate(deferred: DeferredWgrads) -> None:
    """Compute the gradients that were left, and add them to the weights' gradients."""
    for compute in deferred:
        compute()


def attach_queue(module: nn.Module, queue: WeightGradientQueue) -> None:
    """Give the queue to every layer in a module that can use one."""
    for layer in module.modules():
        if hasattr(layer, "weight_gradients"):
            layer.weight_gradients = queue


@cache
def apex_extension() -> ModuleType | None:
    """apex's kernel that adds a bfloat16 product to a float32 sum; it comes with NVIDIA's containers only."""
    try:
        return importlib.import_module("fused_weight_gradient_mlp_cuda")
    except (ImportError, OSError, RuntimeError):
        return None


def add_product_(total_OI: Tensor, grad_RO: Tensor, x_RI: Tensor) -> None:
    """total += grad^T x, in place; the total in at least float32."""
    if total_OI.dtype is grad_RO.dtype:
        total_OI.addmm_(grad_RO.T, x_RI)
    elif not grad_RO.is_cuda:  # CPUs multiply bfloat16 far slower than float32
        total_OI.addmm_(grad_RO.T.to(total_OI.dtype), x_RI.to(total_OI.dtype))
    elif apex_extension() is not None:
        apex_extension().wgrad_gemm_accum_fp32(x_RI.contiguous(), grad_RO.contiguous(), total_OI)
    else:
        total_OI.add_(grad_RO.T @ x_RI)


def accumulate_or_defer(
    weight: Tensor,
    queue: WeightGradientQueue | None,
    *,
    add: Callable[[Tensor], None],
    whole: Callable[[], Tensor],
) -> Tensor | None:
    """See to a weight's gradient, from inside the backward of a layer.

    Args:
        weight: whose.
        queue: takes it for later, if it is open.
        add: adds the gradient to a sum in place.
        whole: the gradient by itself.

    Returns:
        What autograd is to add; None where nothing is left for it.
    """

    def finish() -> None:
        if (main := getattr(weight, "main_grad", None)) is not None:
            add(main)
        else:
            torch.autograd.backward(weight, whole())

    if queue is not None and queue.is_open:
        queue.add(finish)
    elif getattr(weight, "main_grad", None) is not None:
        finish()
    else:
        return whole()
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight_OI: Tensor, queue: WeightGradientQueue | None) -> Tensor:  # noqa: ANN001 - torch's
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight_OI, queue  # the parameter, where a checkpoint would bring back a copy
        return F.linear(x, weight_OI)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN001 - torch's
        (x,), weight_OI = ctx.saved_tensors, ctx.weight
        x_grad = grad @ weight_OI if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return x_grad, None, None
        grad_RO, x_RI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        left = accumulate_or_defer(
            weight_OI, ctx.queue, add=lambda main: add_product_(main, grad_RO, x_RI), whole=lambda: grad_RO.T @ x_RI
        )
        return x_grad, left, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, queue: WeightGradientQueue | None) -> Tensor:  # noqa: ANN001
        ctx.save_for_backward(x_RI, counts_E)
        ctx.weight, ctx.queue = weight_EOI, queue
        return grouped_linear(x_RI, weight_EOI, counts_E)

    @staticmethod
    def backward(ctx, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # noqa: ANN001
        (x_RI, counts_E), weight_EOI = ctx.saved_tensors, ctx.weight
        x_grad = grouped_linear(grad_RO, weight_EOI.transpose(1, 2), counts_E) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return x_grad, None, None, None
        left = accumulate_or_defer(
            weight_EOI,
            ctx.queue,
            add=lambda main: add_grouped_product_(main, grad_RO, x_RI, counts_E),
            whole=lambda: grouped_product(grad_RO, x_RI, counts_E),
        )
        return x_grad, left, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, weight_VD: Tensor) -> Tensor:  # noqa: ANN001 - torch's
        ctx.save_for_backward(rows)
        ctx.weight = weight_VD
        return F.embedding(rows, weight_VD)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor | None]:  # noqa: ANN001 - torch's
        (rows,), weight_VD = ctx.saved_tensors, ctx.weight
        # a frequent token has thousands of summands in a microbatch, of which a bfloat16 sum keeps the first 256
        exact = grad if grad.dtype is torch.float64 else grad.float()
        main = getattr(weight_VD, "main_grad", None)
        if main is not None and not grad.is_cuda:
            main.index_add_(0, rows.reshape(-1), exact.reshape(-1, grad.shape[-1]).to(main.dtype))
            return None, None
        # on a GPU index_add_ adds in any order; this sorts first, so that a run can be repeated bit for bit
        total_VD = torch.ops.aten.embedding_dense_backward(exact, rows, len(weight_VD), -1, False)
        if main is None:
            return None, total_VD.to(weight_VD.dtype)
        main.add_(total_VD)
        return None, None


def embedding(rows: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of a table by number: [...] int64 to [..., D]; its gradient is summed in at least float32."""
    return _Embedding.apply(rows, weight_VD)


def linear(x: Tensor, weight_OI: Tensor, queue: WeightGradientQueue | None = None) -> Tensor:
    """x W^T; [..., I] to [..., O]."""
    return _Linear.apply(x, weight_OI, queue)


def expert_linear(
    x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, queue: WeightGradientQueue | None = None
) -> Tensor:
    """y_r = W_e x_r for the rows r of group e, as `grouped_linear`."""
    return _GroupedLinear.apply(x_RI, weight_EOI, counts_E, queue)
