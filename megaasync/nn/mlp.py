"""The SwiGLU feed-forward layer (arXiv 2002.05202)."""

from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.nn.linear import Linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, *, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, ffn_hidden_size)
        self.up = Linear(hidden_size, ffn_hidden_size)
        self.down = Linear(ffn_hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
