"""At least float32, and float64 when the run is float64: what must not be rounded further (docs/method.md)."""

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """max(float32, dtype)."""
    return torch.float64 if dtype is torch.float64 else torch.float32
