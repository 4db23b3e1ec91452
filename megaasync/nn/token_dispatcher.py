"""Tokens to their experts and back: sorted by expert on one rank, and by an all-to-all where the experts are spread.

A rank sends and takes part in every exchange whether or not it has a token for the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaasync.distributed.differentiable import all_to_all
from megaasync.distributed.rank_group import ALONE, RankGroup


class _Copies(torch.autograd.Function):
    """Tokens, once for each of their K choices, in the order of the experts; the backward sums in the tokens' order.

    Plain indexing would add into place, in an order that a GPU does not fix; so runs repeat bit for bit.
    """

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_R: Tensor, top_k: int) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.save_for_backward(order_R)
        ctx.top_k = top_k
        return x_TD[order_R // top_k]

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001 - torch's signature
        (order_R,) = ctx.saved_tensors
        return grad_RD[inverse_of(order_R)].unflatten(0, (-1, ctx.top_k)).sum(dim=1), None, None


class _Permute(torch.autograd.Function):
    """Rows in another order. The backward is a gather by the inverse permutation, for the same reason."""

    @staticmethod
    def forward(ctx, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.save_for_backward(inverse_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001 - torch's signature
        (inverse_R,) = ctx.saved_tensors
        return grad_RD[inverse_R], None, None


def inverse_of(order_R: Tensor) -> Tensor:
    """The inverse of a permutation."""
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return inverse_R


@dataclass(frozen=True, slots=True)
class _Exchange:
    """How rows travelled to the ranks of their experts, and in what order they were put there."""

    sent_sizes: list[int]
    received_sizes: list[int]
    order_R: Tensor


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows where their experts are.

    Attributes:
        rows_RD: [R, D], sorted by expert.
        counts_E: [E of this rank] int64, rows of each.
        order_R: positions in [T x K] of the rows that this rank sent, in the order in which they went.
        exchange: None if all experts are here.
        top_k: K.
    """

    rows_RD: Tensor
    counts_E: Tensor
    order_R: Tensor
    exchange: _Exchange | None
    top_k: int

    def copies_of(self, x_TD: Tensor) -> Tensor:
        """The rows of these tokens, if all experts are here."""
        return x_TD[self.order_R // self.top_k]


class TokenDispatcher:
    """Dispatch and combine for E experts spread evenly, in their order, over the ranks of a group."""

    def __init__(self, *, num_experts: int, capacity_factor: float | None = None, group: RankGroup = ALONE) -> None:
        """A dispatcher.

        Args:
            num_experts: E, over all ranks.
            capacity_factor: an expert takes at most this many times T K / E of a rank's choices, the earliest in the
                batch; others are dropped. None drops none.
            group: ranks over which the experts are spread.
        """
        self._num_experts, self._capacity_factor, self._group = num_experts, capacity_factor, group

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor) -> Dispatched:
        """[T, D] tokens, once for each of their K experts, to where these are."""
        top_k, experts_R = experts_TK.shape[1], experts_TK.flatten()
        order_R = experts_R.argsort(stable=True)
        counts_E = experts_R.new_zeros(self._num_experts).index_add_(0, experts_R, torch.ones_like(experts_R))
        if self._capacity_factor is None:
            rows_RD = _Copies.apply(x_TD, order_R, top_k)
        else:
            capacity = -int(-self._capacity_factor * len(experts_R) // self._num_experts)
            place_R = (
                torch.arange(len(order_R), device=order_R.device) - (counts_E.cumsum(0) - counts_E)[experts_R[order_R]]
            )
            order_R, counts_E = order_R[place_R < capacity], counts_E.clamp_max(capacity)
            rows_RD = x_TD.repeat_interleave(top_k, dim=0)[order_R]
        if self._group.size == 1:
            return Dispatched(rows_RD, counts_E, order_R, None, top_k)
        sent_XE = counts_E.view(self._group.size, -1)
        received_XE = self._group.exchange(sent_XE)
        sent_sizes, received_sizes = self.split_sizes(sent_XE, received_XE)
        arrived_RD = all_to_all(rows_RD, self._group, received_sizes=received_sizes, sent_sizes=sent_sizes)
        # they come by rank and, from each, by expert; wanted by expert
        here = received_XE.shape[1]
        experts_R = torch.arange(here, device=rows_RD.device).repeat(self._group.size)
        by_expert_R = experts_R.repeat_interleave(received_XE.flatten(), output_size=len(arrived_RD)).argsort(
            stable=True
        )
        sorted_RD = _Permute.apply(arrived_RD, by_expert_R, inverse_of(by_expert_R))
        return Dispatched(
            sorted_RD, received_XE.sum(dim=0), order_R, _Exchange(sent_sizes, received_sizes, by_expert_R), top_k
        )

    def split_sizes(self, sent_XE: Tensor, received_XE: Tensor) -> tuple[list[int], list[int]]:
        """Rows to and from each rank; the one place where the host waits for the device."""
        sent, received = torch.stack([sent_XE.sum(dim=1), received_XE.sum(dim=1)]).tolist()
        return sent, received

    def combine(self, y_RD: Tensor, dispatched: Dispatched, weights_TK: Tensor) -> Tensor:
        """[T, D]: the sum of each token's experts' outputs by their weights; dropped choices add nothing."""
        if (exchange := dispatched.exchange) is not None:
            y_RD = _Permute.apply(y_RD, inverse_of(exchange.order_R), exchange.order_R)
            y_RD = all_to_all(y_RD, self._group, received_sizes=exchange.sent_sizes, sent_sizes=exchange.received_sizes)
        order_R, shape = dispatched.order_R, weights_TK.shape
        if self._capacity_factor is None:
            chosen_RD = _Permute.apply(y_RD, inverse_of(order_R), order_R)
        else:
            chosen_RD = y_RD.new_zeros(weights_TK.numel(), y_RD.shape[1]).index_copy(0, order_R, y_RD)
        chosen_TKD = chosen_RD.view(*shape, y_RD.shape[1])
        return (chosen_TKD * weights_TK.to(y_RD.dtype).unsqueeze(-1)).sum(dim=1)
