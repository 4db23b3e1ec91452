"""Rotary position embedding (arXiv 2104.09864), halves convention as in Llama and Hugging Face."""

import torch
from torch import Tensor, nn

from megaasync.nn.precision import at_least_float32


class RotaryTables(nn.Module):
    """cos and sin of every position, [S, K] each, in at least float32; not saved."""

    cos_SK: Tensor
    sin_SK: Tensor

    def __init__(self, *, seq_length: int, head_size: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        angles = torch.outer(torch.arange(seq_length, dtype=torch.float64), theta**-exponents)
        angles_SK = torch.cat([angles, angles], dim=-1)
        exact = at_least_float32(torch.get_default_dtype())
        self.register_buffer("cos_SK", angles_SK.cos().to(exact), persistent=False)
        self.register_buffer("sin_SK", angles_SK.sin().to(exact), persistent=False)

    def rotate(self, x_BHSK: Tensor) -> Tensor:
        """Rotate queries or keys by their positions: [B, H, S, K] to the same."""
        length = x_BHSK.shape[2]
        exact = x_BHSK.to(self.cos_SK.dtype)
        first, second = exact.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (exact * self.cos_SK[:length] + turned * self.sin_SK[:length]).to(x_BHSK.dtype)
