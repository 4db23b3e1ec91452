"""Rotary position embedding (arXiv 2104.09864), halves convention as in Llama and Hugging Face."""

import numpy as np
import torch
from torch import Tensor, nn

from megaasync.nn.precision import at_least_float32


class RotaryTables(nn.Module):
    """cos and sin of every position, [S, K] each, in at least float32; not saved."""

    cos_SK: Tensor
    sin_SK: Tensor

    def __init__(self, *, seq_length: int, head_size: int, theta: float) -> None:
        super().__init__()
        # numpy, because torch.arange on the meta device, where shapes are asked for, imports torch's compiler: seconds
        angles = np.outer(np.arange(seq_length), theta ** -(np.arange(0, head_size, 2) / head_size))
        angles_SK = torch.from_numpy(np.concatenate([angles, angles], axis=-1))
        place = {"dtype": at_least_float32(torch.get_default_dtype()), "device": torch.get_default_device()}
        self.register_buffer("cos_SK", angles_SK.cos().to(**place), persistent=False)
        self.register_buffer("sin_SK", angles_SK.sin().to(**place), persistent=False)

    def rotate(self, x_BSHK: Tensor) -> Tensor:
        """Rotate queries or keys by their positions: [B, S, H, K] to the same."""
        cos_S1K, sin_S1K = (table_SK[: x_BSHK.shape[1], None] for table_SK in (self.cos_SK, self.sin_SK))
        exact = x_BSHK.to(cos_S1K.dtype)
        first, second = exact.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (exact * cos_S1K + turned * sin_S1K).to(x_BSHK.dtype)
