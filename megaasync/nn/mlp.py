"""The SwiGLU feed-forward layer (arXiv 2002.05202)."""

from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.nn.linear import Linear
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); tensor-parallel ranks have a part of the inner width each."""

    def __init__(self, *, hidden_size: int, ffn_hidden_size: int, tensor: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        self._tensor = tensor
        width = tensor.share(ffn_hidden_size)
        self.gate = Linear(hidden_size, width)
        self.up = Linear(hidden_size, width)
        self.down = Linear(width, hidden_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D], or S / size under sequence parallelism."""
        x_BSD = self._tensor.enter(x_BSD)
        return self._tensor.leave(self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD)))
