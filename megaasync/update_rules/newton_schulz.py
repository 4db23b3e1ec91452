"""Orthogonalisation by a quintic Newton-Schulz iteration (Keller Jordan's Muon)."""

from typing import Literal

import torch
from torch import Tensor

KELLER = (3.4445, -4.7750, 2.0315)
Precision = Literal["auto", "float32", "bfloat16"]

_STACKED = 1 << 15  # elements of a matrix up to which one product for a whole stack beats a loop on a CPU
_BLOCKS = 4  # of the rows of a symmetric product
_BLOCKED = 384  # rows from which making only half of those blocks pays


def precision_of(setting: Precision, matrices: Tensor) -> torch.dtype:
    """The dtype of the products: `auto` is bfloat16 for float32 on a GPU, else that of the matrices."""
    if setting == "bfloat16" or (setting == "auto" and matrices.is_cuda and matrices.dtype is torch.float32):
        return torch.bfloat16
    return matrices.dtype


def orthogonalize(matrices: Tensor, *, steps: int, precision: Precision = "auto") -> Tensor:
    """Bring the singular values of each matrix near one, keeping its singular vectors.

    X <- a X + (b A + c A^2) X with A = X X^T, on X divided by its Frobenius norm; tall matrices are transposed.

    Args:
        matrices: [..., rows, cols], at least float32. Not written to.
        steps: iterations.
        precision: of the products; the norm is always of the matrices' own.

    Returns:
        [..., rows, cols] of the same dtype; a zero matrix stays zero, at any small scale the result is the same.
    """
    x = _normalized(matrices).to(precision_of(precision, matrices))
    stack = x.reshape(-1, *x.shape[-2:]).contiguous()
    if stack.is_cuda or stack.shape[1] * stack.shape[2] <= _STACKED:
        stack = _iterate(stack, steps)
    else:
        _iterate_each_(stack, steps)
    return stack.view(x.shape).to(matrices.dtype)


def _normalized(x: Tensor) -> Tensor:
    """Each matrix by its Frobenius norm."""
    tiny = torch.finfo(x.dtype).tiny
    norm = torch.linalg.matrix_norm(x, keepdim=True)
    if not x.is_cuda and x.numel() and norm.amin() > tiny**0.25:  # on a GPU the host would wait for it
        return x / norm
    # Dividing by the largest entry first keeps the norm's squares from vanishing for tiny gradients.
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    return x.div_(torch.linalg.matrix_norm(x, keepdim=True).clamp_min(tiny))


def _iterate(x: Tensor, steps: int) -> Tensor:
    """[n, rows, cols] all at once: three products an iteration, with their sums fused."""
    a, b, c = KELLER
    is_tall = x.shape[1] > x.shape[2]
    for _ in range(steps):
        gram = torch.bmm(x.mT, x) if is_tall else torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, polynomial) if is_tall else (polynomial, x)), beta=a)
    return x


def _iterate_each_(stack: Tensor, steps: int) -> None:
    """[n, rows, cols] in place, one by one, with fewer operations, in memory that is used again.

    X X^T and polynomials of it are symmetric, so half of their blocks are copies of the others. And of a wide X two
    iterations are made at once: with P(A) = a I + b A + c A^2, the second one's X X^T is P A P, and Q = P(P A P) P
    leads from X to the second X, so that one product with X does for two. Of a tall X all that is from the right.
    """
    a, b, c = KELLER
    is_tall = stack.shape[1] > stack.shape[2]
    short, long = sorted(stack.shape[1:])
    at_once = 2 if long >= 2 * short else 1
    gram, first, second, both = stack.new_empty(4, short, short)
    spare = stack.new_empty(stack.shape[1:])
    for x in stack:
        source, target = x, spare
        for done in range(0, steps, at_once):
            _symmetric_product(*((source.T, source) if is_tall else (source, source.T)), gram)
            _symmetric_product(gram, gram, first, beta=b, alpha=c)
            if done + at_once > steps or at_once == 1:
                torch.addmm(source, *((source, first) if is_tall else (first, source)), beta=a, out=target)
            else:
                first.diagonal().add_(a)
                _symmetric_product(first, gram, second)
                _symmetric_product(second, first, gram)
                _symmetric_product(gram, gram, second, beta=b, alpha=c)
                second.diagonal().add_(a)
                _symmetric_product(second, first, both)
                torch.mm(*((source, both) if is_tall else (both, source)), out=target)
            source, target = target, source
        if source is not x:
            x.copy_(source)


def _symmetric_product(left: Tensor, right: Tensor, out: Tensor, *, beta: float = 0.0, alpha: float = 1.0) -> None:
    """out = beta left + alpha left right, all of it symmetric: the upper blocks are copies of the lower ones."""
    rows = left.shape[0]
    size = -(-rows // _BLOCKS) if rows >= _BLOCKED else rows
    for low in range(0, rows, size):
        high = min(low + size, rows)
        strip, columns = out[low:high, :high], right[:, :high]
        if beta:
            torch.addmm(left[low:high, :high], left[low:high], columns, beta=beta, alpha=alpha, out=strip)
        else:
            torch.mm(left[low:high], columns, out=strip)
        if low:
            out[:low, low:high] = out[low:high, :low].T
