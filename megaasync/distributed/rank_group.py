"""Ranks that act together, and what they do together. A group arrives as an argument; a rank alone sends nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megaasync.distributed.p2p import wait

# torch 2.13 gave these two new names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group as one rank sees it.

    Attributes:
        handle: torch's group; None for a rank alone.
        index: this rank's number in the group.
        size: ranks in it.
        timeout: longest wait for the others, see `megaasync.distributed.p2p.wait`.
    """

    handle: dist.ProcessGroup | None = None
    index: int = 0
    size: int = 1
    timeout: timedelta | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankGroup":
        """Itself: copies of a module talk to the same ranks."""
        return self

    def all_reduce(self, tensor: Tensor, *, largest: bool = False) -> None:
        """Make `tensor` the sum (or the largest) over the ranks, in place."""
        if self.handle is not None:
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            wait(dist.all_reduce(tensor, op, group=self.handle, async_op=True), self.timeout, peer=None)

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """Put the ranks' parts, in the order of the ranks, into `whole`; `part` may lie in its own place there.

        Both contiguous; only the number of elements counts.
        """
        if self.handle is None:
            if whole.data_ptr() != part.data_ptr():
                whole.copy_(part.view_as(whole))
            return
        wait(_all_gather(whole.view(-1), part.view(-1), group=self.handle, async_op=True), self.timeout, peer=None)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """Put the sum of this rank's part of `whole` into `part`, which may be that part itself.

        Other parts of `whole` are then undefined. Both contiguous; only the number of elements counts.
        """
        if self.handle is None:
            if whole.data_ptr() != part.data_ptr():
                part.copy_(whole.view_as(part))
            return
        wait(_reduce_scatter(part.view(-1), whole.view(-1), group=self.handle, async_op=True), self.timeout, peer=None)

    def reduce_shards(self, whole: Tensor, shards: Sequence[slice]) -> None:
        """Put the sum of each rank's shard of a flat tensor into that shard, on that rank.

        Shards of one size are one collective; else each is reduced to its rank. Other shards are then undefined.

        Args:
            whole: [n], the same length on all ranks.
            shards: one per rank, in their order, without gaps.
        """
        if self.handle is None:
            return
        if self._are_equal(shards):
            self.reduce_scatter(whole[shards[self.index]], whole[shards[0].start : shards[-1].stop])
            return
        self._each_shard(whole, shards, lambda shard, root: dist.reduce(shard, root, group=self.handle, async_op=True))

    def gather_shards(self, whole: Tensor, shards: Sequence[slice]) -> None:
        """Fill a flat tensor, of which each rank has written its shard; see `reduce_shards`."""
        if self.handle is None:
            return
        if self._are_equal(shards):
            self.all_gather(whole[shards[0].start : shards[-1].stop], whole[shards[self.index]])
            return
        self._each_shard(
            whole, shards, lambda shard, root: dist.broadcast(shard, root, group=self.handle, async_op=True)
        )

    @staticmethod
    def _are_equal(shards: Sequence[slice]) -> bool:
        return len({shard.stop - shard.start for shard in shards}) == 1

    def _each_shard(self, whole: Tensor, shards: Sequence[slice], start: Callable[[Tensor, int], dist.Work]) -> None:
        """Start a collective per shard that is not empty, then wait for all."""
        roots = dist.get_process_group_ranks(self.handle)
        works = [
            start(whole[shard], root) for shard, root in zip(shards, roots, strict=True) if shard.stop > shard.start
        ]
        for work in works:
            wait(work, self.timeout, peer=None)

    def all_to_all(self, received: Tensor, sent: Tensor, *, received_sizes: list[int], sent_sizes: list[int]) -> None:
        """Send a run of rows of `sent` to every rank and put what comes from each, in their order, into `received`.

        Args:
            received: [sum(received_sizes), ...].
            sent: [sum(sent_sizes), ...].
            received_sizes: rows from each rank.
            sent_sizes: rows to each rank.
        """
        if self.handle is None:
            received.copy_(sent)
            return
        work = dist.all_to_all_single(
            received, sent.contiguous(), received_sizes, sent_sizes, group=self.handle, async_op=True
        )
        wait(work, self.timeout, peer=None)

    def exchange(self, sent: Tensor) -> Tensor:
        """Row i of `sent` goes to rank i; row i of the result came from rank i. Both [size, ...]."""
        received = torch.empty_like(sent)
        self.all_to_all(received, sent, received_sizes=[1] * self.size, sent_sizes=[1] * self.size)
        return received


ALONE = RankGroup()
