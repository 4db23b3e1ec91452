"""Orthogonalisation by a quintic Newton-Schulz iteration (Keller Jordan's Muon; METHOD.md section 5)."""

import torch
from torch import Tensor

KELLER = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, *, steps: int) -> Tensor:
    """Bring the singular values of each matrix near one, keeping its singular vectors.

    X <- a X + (b A + c A^2) X with A = X X^T, on X divided by its Frobenius norm; tall matrices are transposed.

    Args:
        matrices: [..., rows, cols], at least float32. Not written to.
        steps: iterations.

    Returns:
        [..., rows, cols] of the same dtype; a zero matrix stays zero, at any small scale the result is the same.
    """
    a, b, c = KELLER
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # Dividing by the largest entry first keeps the norm's squares from vanishing for tiny gradients.
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(tiny)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
