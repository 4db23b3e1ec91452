"""Root mean square norm (arXiv 1910.07467)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.nn.precision import at_least_float32


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in at least float32; weight [D]."""

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self._eps = eps

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        exact = at_least_float32(x_BSD.dtype)
        normed = F.rms_norm(x_BSD.to(exact), (x_BSD.shape[-1],), self.weight.to(exact), self._eps)
        return normed.to(x_BSD.dtype)
