"""Causal grouped-query attention: projections, rotary positions, and the backend's attention between them.

With `norm_eps`, queries and keys pass an RMSNorm over each head before the rotary positions, as in Qwen3
(arXiv 2505.09388, section 2).
"""

from typing import Any

from torch import Tensor, nn

from megaasync.nn.layer_context import DEFAULT_CONTEXT, LayerContext
from megaasync.nn.rope import RotaryTables
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class Attention(nn.Module):
    """Query, key, value and output projections around causal attention; H heads share G key-value heads.

    Tensor-parallel ranks have H / size and G / size heads each.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        norm_eps: float | None = None,
        tensor: TensorParallel = NO_TENSOR_PARALLEL,
        context: LayerContext = DEFAULT_CONTEXT,
    ) -> None:
        """Build the layer.

        Args:
            hidden_size: D.
            num_heads: H of the whole layer.
            num_kv_heads: G of the whole layer.
            norm_eps: of the norms of queries and keys, whose weights [K] all heads share; None for no such norms.
            tensor: the ranks among which heads are split.
            context: how it is computed.
        """
        super().__init__()
        self._head_size, kernels = hidden_size // num_heads, context.kernels
        heads, kv_heads = tensor.share(num_heads), tensor.share(num_kv_heads)
        self.query = kernels.linear(hidden_size, self._head_size * heads)
        self.key = kernels.linear(hidden_size, self._head_size * kv_heads)
        self.value = kernels.linear(hidden_size, self._head_size * kv_heads)
        self.query_norm, self.key_norm = (
            # each rank normalises its own heads of the whole sequence, whatever is split between layers
            (None if norm_eps is None else kernels.norm(self._head_size, eps=norm_eps, tensor=NO_TENSOR_PARALLEL))
            for _ in range(2)
        )
        self.core = kernels.attention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=self._head_size, tensor=tensor
        )
        self.output = kernels.row_linear(self._head_size * heads, hidden_size, tensor)

    def _heads(self, x_BSX: Tensor, norm: nn.Module | None = None) -> Tensor:
        x_BSHK = x_BSX.unflatten(-1, (-1, self._head_size))
        return x_BSHK if norm is None else norm(x_BSHK)

    def forward(self, x_BSD: Tensor, rotary: RotaryTables, attn_mask: Any = None) -> Tensor:
        """Attend.

        Args:
            x_BSD: [B, S, D] of the whole sequence.
            rotary: of positions; only their distances matter, so documents need not begin at 0.
            attn_mask: documents, as the backend made it; None for the whole sequence.

        Returns:
            [B, S, D], or S / size under sequence parallelism.
        """
        query_BSHK = rotary.rotate(self._heads(self.query(x_BSD), self.query_norm))
        key_BSGK = rotary.rotate(self._heads(self.key(x_BSD), self.key_norm))
        return self.output(self.core(query_BSHK, key_BSGK, self._heads(self.value(x_BSD)), attn_mask))
