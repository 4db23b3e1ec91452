"""Root mean square norm (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn

from megaasync.nn.precision import at_least_float32


class _RmsNorm(torch.autograd.Function):
    """Keeps its input in the dtype it came in and one number per token; the rest is computed again in the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:  # noqa: ANN001 - torch's signature
        exact = at_least_float32(x.dtype)
        wide = x.to(exact)
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight_D, scale)
        return (wide * scale).mul_(weight_D.to(exact)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN001 - torch's signature
        x, weight_D, scale = ctx.saved_tensors
        grad_wide, normed = grad.to(scale.dtype), x.to(scale.dtype) * scale
        weight_grad_D = (grad_wide * normed).flatten(0, -2).sum(dim=0)
        toward = grad_wide * weight_D.to(scale.dtype)
        along = (toward * normed).mean(dim=-1, keepdim=True)
        x_grad = toward.sub_(normed.mul_(along)).mul_(scale)
        return x_grad.to(x.dtype), weight_grad_D.to(weight_D.dtype), None


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in at least float32; weight [D]."""

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self._eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        return _RmsNorm.apply(x_BSD, self.weight, self._eps)
