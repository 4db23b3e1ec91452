"""Causal grouped-query attention: projections, rotary positions, and the backend's attention between them."""

from typing import Any

from torch import Tensor, nn

from megaasync.nn.computation import PLAIN, Computation
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
        tensor: TensorParallel = NO_TENSOR_PARALLEL,
        computation: Computation = PLAIN,
    ) -> None:
        super().__init__()
        self._head_size, kernels = hidden_size // num_heads, computation.kernels
        heads, kv_heads = tensor.share(num_heads), tensor.share(num_kv_heads)
        self.query = kernels.linear(hidden_size, self._head_size * heads)
        self.key = kernels.linear(hidden_size, self._head_size * kv_heads)
        self.value = kernels.linear(hidden_size, self._head_size * kv_heads)
        self.core = kernels.attention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=self._head_size, tensor=tensor
        )
        self.output = kernels.row_linear(self._head_size * heads, hidden_size, tensor)

    def _heads(self, x_BSX: Tensor) -> Tensor:
        return x_BSX.unflatten(-1, (-1, self._head_size))

    def forward(self, x_BSD: Tensor, rotary: RotaryTables, within: Any = None) -> Tensor:
        """Attend.

        Args:
            x_BSD: [B, S, D] of the whole sequence.
            rotary: of positions; only their distances matter, so documents need not begin at 0.
            within: documents, as the backend made it; None for the whole sequence.

        Returns:
            [B, S, D], or S / size under sequence parallelism.
        """
        query_BSHK = rotary.rotate(self._heads(self.query(x_BSD)))
        key_BSGK = rotary.rotate(self._heads(self.key(x_BSD)))
        return self.output(self.core(query_BSHK, key_BSGK, self._heads(self.value(x_BSD)), within))
