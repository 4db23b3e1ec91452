"""Causal grouped-query attention (arXiv 2305.13245) through torch's scaled dot product attention."""

from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.nn.linear import Linear
from megaasync.nn.rope import RotaryTables


class Attention(nn.Module):
    """Query, key, value and output projections around causal attention; H heads share G key-value heads."""

    def __init__(self, *, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self._head_size = hidden_size // num_heads
        self.query = Linear(hidden_size, num_heads * self._head_size)
        self.key = Linear(hidden_size, num_kv_heads * self._head_size)
        self.value = Linear(hidden_size, num_kv_heads * self._head_size)
        self.output = Linear(num_heads * self._head_size, hidden_size)

    def _heads(self, x_BSX: Tensor) -> Tensor:
        batch, length, _ = x_BSX.shape
        return x_BSX.view(batch, length, -1, self._head_size).transpose(1, 2)

    def forward(self, x_BSD: Tensor, rotary: RotaryTables) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        query_BHSK = rotary.rotate(self._heads(self.query(x_BSD)))
        key_BGSK = rotary.rotate(self._heads(self.key(x_BSD)))
        value_BGSK = self._heads(self.value(x_BSD))
        mixed_BHSK = F.scaled_dot_product_attention(query_BHSK, key_BGSK, value_BGSK, is_causal=True, enable_gqa=True)
        return self.output(mixed_BHSK.transpose(1, 2).reshape(x_BSD.shape))
