"""A linear layer without bias, and the embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.kernels.weight_gradients import WeightGradientQueue, linear


class Linear(nn.Module):
    """y = x W^T; weight [out, in].

    Attributes:
        weight_gradients: where a split backward leaves the weight's gradient.
    """

    weight_gradients: WeightGradientQueue | None = None

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return linear(x, self.weight, self.weight_gradients)


class Embedding(nn.Module):
    """Rows by token id; weight [V, D]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] int64 to [B, S, D]."""
        return F.embedding(tokens_BS, self.weight)
