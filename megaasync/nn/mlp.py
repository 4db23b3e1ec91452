"""The SwiGLU feed-forward layer (arXiv 2002.05202)."""

from torch import Tensor, nn

from megaasync.kernels.activation import swiglu
from megaasync.nn.layer_context import DEFAULT_CONTEXT, LayerContext
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); tensor-parallel ranks have a part of the inner width each."""

    def __init__(
        self,
        *,
        hidden_size: int,
        ffn_hidden_size: int,
        tensor: TensorParallel = NO_TENSOR_PARALLEL,
        context: LayerContext = DEFAULT_CONTEXT,
    ) -> None:
        super().__init__()
        self._recompute, kernels = context.recompute, context.kernels
        width = tensor.share(ffn_hidden_size)
        self.gate = kernels.linear(hidden_size, width)
        self.up = kernels.linear(hidden_size, width)
        self.down = kernels.row_linear(width, hidden_size, tensor)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] of the whole sequence to [B, S, D], or S / size under sequence parallelism."""
        gate_BSF, up_BSF = self.gate(x_BSD), self.up(x_BSD)
        inner_BSF = swiglu(gate_BSF, up_BSF)
        with self._recompute.recompute_in_backward(inner_BSF, lambda: swiglu(gate_BSF, up_BSF)):
            return self.down(inner_BSF)
