"""Rows in another order, whose backwards are gathers too.

Plain indexing would add gradients into place, in an order that a GPU does not fix; so runs repeat bit for bit.
"""

import torch
from torch import Tensor


def inverse_of(order_R: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return inverse_R


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.save_for_backward(inverse_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001 - torch's signature
        (inverse_R,) = ctx.saved_tensors
        return grad_RD[inverse_R], None, None


def permuted(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """[R, D] rows x[order], for an order and its inverse."""
    return _Permute.apply(x_RD, order_R, inverse_R)


class _Copies(torch.autograd.Function):
    """The backward sums a token's gradients in the order of its choices."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_R: Tensor, top_k: int) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.save_for_backward(order_R)
        ctx.top_k = top_k
        return x_TD[order_R // top_k]

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001 - torch's signature
        (order_R,) = ctx.saved_tensors
        return grad_RD[inverse_of(order_R)].unflatten(0, (-1, ctx.top_k)).sum(dim=1), None, None


def copies_by_expert(x_TD: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, once for each of their K experts, sorted by expert.

    Returns:
        [R, D] rows, and [R] int64, the place in [T x K] of each.
    """
    order_R = experts_TK.flatten().argsort(stable=True)
    return _Copies.apply(x_TD, order_R, experts_TK.shape[1]), order_R


def sum_of_copies(y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, D]: the sum of each token's rows by their weights, for the order of `copies_by_expert`."""
    chosen_TKD = permuted(y_RD, inverse_of(order_R), order_R).view(*weights_TK.shape, y_RD.shape[1])
    return (chosen_TKD * weights_TK.to(y_RD.dtype).unsqueeze(-1)).sum(dim=1)
