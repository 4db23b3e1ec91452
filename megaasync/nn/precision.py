"""At least float32, and float64 when the run is float64: what must not be rounded further (docs/method.md)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """max(float32, dtype)."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules made within have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
