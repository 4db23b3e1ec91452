"""The gate of a SwiGLU feed-forward."""

import torch
from torch import Tensor
from torch.nn import functional as F


class _Swiglu(torch.autograd.Function):
    """Keeps its two inputs and not the activation in between, which costs nothing to make again."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001 - torch's signature
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202), elementwise."""
    return _Swiglu.apply(gate, up)
