"""A linear layer without bias, and the embedding."""

import torch
from torch import Tensor, nn

from megaasync.config.parallel_dims import local_range
from megaasync.kernels.weight_gradients import WeightGradientQueue, embedding, linear
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


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


class RowLinear(Linear):
    """A linear layer whose inputs are split over tensor-parallel ranks, with the sum over them."""

    def __init__(self, in_features: int, out_features: int, tensor: TensorParallel) -> None:
        super().__init__(in_features, out_features)
        self._tensor = tensor

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, in of this rank] to [B, S, out], or S / size under sequence parallelism."""
        return self._tensor.leave(super().forward(x))


class Embedding(nn.Module):
    """Rows by token id; weight [V, D], of which tensor-parallel ranks have a run of rows each."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tensor: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        self._tensor = tensor
        self._rows = local_range(vocab_size, index=tensor.group.index, count=tensor.size)
        self.weight = nn.Parameter(torch.empty(len(self._rows), hidden_size))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] int64 to [B, S, D], or S / size under sequence parallelism."""
        if self._tensor.size == 1:
            return embedding(tokens_BS, self.weight)
        rows_BS = tokens_BS - self._rows.start
        elsewhere_BS = (rows_BS < 0) | (rows_BS >= len(self._rows))
        x_BSD = embedding(rows_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return self._tensor.leave(x_BSD.masked_fill(elsewhere_BS.unsqueeze(-1), 0.0))
