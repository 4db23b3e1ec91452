"""Causal grouped-query attention (arXiv 2305.13245) through torch's scaled dot product attention."""

from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.nn.linear import Linear
from megaasync.nn.rope import RotaryTables
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class Attention(nn.Module):
    """Query, key, value and output projections around causal attention; H heads share G key-value heads.

    Tensor-parallel ranks have H / size and G / size heads each.
    """

    def __init__(
        self, *, hidden_size: int, num_heads: int, num_kv_heads: int, tensor: TensorParallel = NO_TENSOR_PARALLEL
    ) -> None:
        super().__init__()
        self._head_size, self._tensor = hidden_size // num_heads, tensor
        width, kv_width = (self._head_size * tensor.share(heads) for heads in (num_heads, num_kv_heads))
        self.query = Linear(hidden_size, width)
        self.key = Linear(hidden_size, kv_width)
        self.value = Linear(hidden_size, kv_width)
        self.output = Linear(width, hidden_size)

    def _heads(self, x_BSX: Tensor) -> Tensor:
        batch, length, _ = x_BSX.shape
        return x_BSX.view(batch, length, -1, self._head_size).transpose(1, 2)

    def forward(self, x_BSD: Tensor, rotary: RotaryTables) -> Tensor:
        """[B, S, D] of the whole sequence to [B, S, D], or S / size under sequence parallelism."""
        query_BHSK = rotary.rotate(self._heads(self.query(x_BSD)))
        key_BGSK = rotary.rotate(self._heads(self.key(x_BSD)))
        value_BGSK = self._heads(self.value(x_BSD))
        mixed_BHSK = F.scaled_dot_product_attention(query_BHSK, key_BGSK, value_BGSK, is_causal=True, enable_gqa=True)
        return self._tensor.leave(self.output(mixed_BHSK.transpose(1, 2).flatten(2)))
