"""The SwiGLU feed-forward layer (arXiv 2002.05202)."""

from torch import Tensor, nn

from megaasync.kernels.activation import swiglu
from megaasync.nn.linear import Linear
from megaasync.nn.recompute import KEEP_ALL, Recompute
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); tensor-parallel ranks have a part of the inner width each."""

    def __init__(
        self,
        *,
        hidden_size: int,
        ffn_hidden_size: int,
        tensor: TensorParallel = NO_TENSOR_PARALLEL,
        recompute: Recompute = KEEP_ALL,
    ) -> None:
        super().__init__()
        self._tensor, self._recompute = tensor, recompute
        width = tensor.share(ffn_hidden_size)
        self.gate = Linear(hidden_size, width)
        self.up = Linear(hidden_size, width)
        self.down = Linear(width, hidden_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] of the whole sequence to [B, S, D], or S / size under sequence parallelism."""
        gate_BSF, up_BSF = self.gate(x_BSD), self.up(x_BSD)
        inner_BSF = swiglu(gate_BSF, up_BSF)
        with self._recompute.instead_of(inner_BSF, lambda: swiglu(gate_BSF, up_BSF)):
            return self._tensor.leave(self.down(inner_BSF))
