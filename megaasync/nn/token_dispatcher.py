"""Tokens to their experts and back: sorted by expert on one rank, and by an all-to-all where the experts are spread.

A rank sends and takes part in every exchange whether or not it has a token for the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaasync.distributed.differentiable import all_to_all
from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.kernels.backend import Kernels
from megaasync.kernels.permutation import inverse_of, permuted
from megaasync.nn.torch_kernels import TORCH_KERNELS


def count_rows(experts_TK: Tensor, num_experts: int) -> Tensor:
    """[E] int64, how often each expert was chosen; not bincount, which would wait for a GPU."""
    experts_R = experts_TK.flatten()
    return experts_R.new_zeros(num_experts).index_add_(0, experts_R, torch.ones_like(experts_R))


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
        order: of the rows that this rank sent, as the backend knows it; where some were dropped, [R] positions in
            [T x K].
        exchange: None if all experts are here.
    """

    rows_RD: Tensor
    counts_E: Tensor
    order: Tensor
    exchange: _Exchange | None


class TokenDispatcher:
    """Dispatch and combine for E experts spread evenly, in their order, over the ranks of a group."""

    def __init__(
        self,
        *,
        num_experts: int,
        capacity_factor: float | None = None,
        group: RankGroup = ALONE,
        kernels: Kernels = TORCH_KERNELS,
    ) -> None:
        """A dispatcher.

        Args:
            num_experts: E, over all ranks.
            capacity_factor: an expert takes at most this many times T K / E of a rank's choices, the earliest in the
                batch; others are dropped. None drops none.
            group: ranks over which the experts are spread.
            kernels: puts rows in order.
        """
        self._kernels = kernels
        self._num_experts, self._capacity_factor, self._group = num_experts, capacity_factor, group

    @property
    def drops_none(self) -> bool:
        """Whether every choice gets its expert."""
        return self._capacity_factor is None

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor) -> Dispatched:
        """[T, D] tokens, once for each of their K experts, to where these are."""
        counts_E = count_rows(experts_TK, self._num_experts)
        if self._capacity_factor is None:
            rows_RD, order = self._kernels.permute(x_TD, experts_TK)
        else:
            rows_RD, order, counts_E = self._drop(x_TD, experts_TK, counts_E)
        if self._group.size == 1:
            return Dispatched(rows_RD, counts_E, order, None)
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
        sorted_RD = permuted(arrived_RD, by_expert_R, inverse_of(by_expert_R))
        return Dispatched(sorted_RD, received_XE.sum(dim=0), order, _Exchange(sent_sizes, received_sizes, by_expert_R))

    def _drop(self, x_TD: Tensor, experts_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, their order and the experts' counts, each expert's latest rows above its capacity left out."""
        experts_R = experts_TK.flatten()
        order_R = experts_R.argsort(stable=True)
        capacity = -int(-self._capacity_factor * len(experts_R) // self._num_experts)
        before_R = (counts_E.cumsum(0) - counts_E)[experts_R[order_R]]
        place_R = torch.arange(len(order_R), device=order_R.device) - before_R
        order_R = order_R[place_R < capacity]
        rows_RD = x_TD.repeat_interleave(experts_TK.shape[1], dim=0)[order_R]
        return rows_RD, order_R, counts_E.clamp_max(capacity)

    def split_sizes(self, sent_XE: Tensor, received_XE: Tensor) -> tuple[list[int], list[int]]:
        """Rows to and from each rank, for which the host waits."""
        sent, received = torch.stack([sent_XE.sum(dim=1), received_XE.sum(dim=1)]).tolist()
        return sent, received

    def combine(self, y_RD: Tensor, dispatched: Dispatched, weights_TK: Tensor) -> Tensor:
        """[T, D]: the sum of each token's experts' outputs by their weights; dropped choices add nothing."""
        if (exchange := dispatched.exchange) is not None:
            y_RD = permuted(y_RD, inverse_of(exchange.order_R), exchange.order_R)
            y_RD = all_to_all(y_RD, self._group, received_sizes=exchange.sent_sizes, sent_sizes=exchange.received_sizes)
        if self._capacity_factor is None:
            return self._kernels.unpermute(y_RD, dispatched.order, weights_TK)
        chosen_RD = y_RD.new_zeros(weights_TK.numel(), y_RD.shape[1]).index_copy(0, dispatched.order, y_RD)
        chosen_TKD = chosen_RD.view(*weights_TK.shape, y_RD.shape[1])
        return (chosen_TKD * weights_TK.to(y_RD.dtype).unsqueeze(-1)).sum(dim=1)
