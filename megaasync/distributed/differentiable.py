"""Collectives paired with their backwards, for what is split over ranks inside a layer (arXiv 1909.08053, 2205.05198).

All act on [B, S, ...] tensors along the sequence, or on whole tensors.
"""

import torch
from torch import Tensor

from megaasync.distributed.rank_group import RankGroup


def gather_sequence(x_BSD: Tensor, group: RankGroup) -> Tensor:
    """[B, S / size, D] of every rank to [B, S, D]."""
    parts = x_BSD.new_empty(group.size, *x_BSD.shape)
    group.all_gather(parts, x_BSD.contiguous())
    return parts.transpose(0, 1).flatten(1, 2)


def scatter_sum(x_BSD: Tensor, group: RankGroup) -> Tensor:
    """This rank's [B, S / size, D] of the ranks' sum of [B, S, D]."""
    parts = x_BSD.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    group.reduce_scatter(mine, parts)
    return mine


def part_of_sequence(x_BSD: Tensor, group: RankGroup) -> Tensor:
    """This rank's [B, S / size, D] of [B, S, D]."""
    return x_BSD.unflatten(1, (group.size, -1))[:, group.index].contiguous()


def summed(x: Tensor, group: RankGroup) -> Tensor:
    """The ranks' sum, in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


class _Pair(torch.autograd.Function):
    """One function forward and another backward, both of (tensor, group)."""

    @staticmethod
    def forward(ctx, x: Tensor, group: RankGroup, forward, backward) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.group, ctx.backward_function = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN001 - torch's signature
        return ctx.backward_function(grad, ctx.group), None, None, None


def _same(x: Tensor, group: RankGroup) -> Tensor:
    return x.view_as(x)


def copy_to_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """Pass on a tensor that is equal on all ranks; the backward sums the gradients, of which each rank has a part."""
    return _Pair.apply(x, group, _same, summed)


def sum_of_ranks(x: Tensor, group: RankGroup) -> Tensor:
    """The sum of the ranks' tensors; its gradient is the same on all."""
    return _Pair.apply(x, group, summed, _same)


def gather_for_shards(x_BSD: Tensor, group: RankGroup) -> Tensor:
    """The whole sequence, for layers of which each rank has a shard: gradients are summed and scattered."""
    return _Pair.apply(x_BSD, group, gather_sequence, scatter_sum)


def scatter_of_shards(x_BSD: Tensor, group: RankGroup) -> Tensor:
    """This rank's part of the sequence of the sum of the shards' outputs."""
    return _Pair.apply(x_BSD, group, scatter_sum, gather_sequence)


def take_part(x_BSD: Tensor, group: RankGroup) -> Tensor:
    """This rank's part of a sequence that all ranks hold whole."""
    return _Pair.apply(x_BSD, group, part_of_sequence, gather_sequence)


def join_parts(x_BSD: Tensor, group: RankGroup) -> Tensor:
    """The whole sequence on all ranks, which go on with it in the same way."""
    return _Pair.apply(x_BSD, group, gather_sequence, part_of_sequence)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, group: RankGroup, received_sizes: list[int], sent_sizes: list[int]) -> Tensor:  # noqa: ANN001
        ctx.group, ctx.received_sizes, ctx.sent_sizes = group, received_sizes, sent_sizes
        received = rows.new_empty(sum(received_sizes), *rows.shape[1:])
        group.all_to_all(received, rows, received_sizes=received_sizes, sent_sizes=sent_sizes)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN001 - torch's signature
        back = grad.new_empty(sum(ctx.sent_sizes), *grad.shape[1:])
        ctx.group.all_to_all(back, grad, received_sizes=ctx.sent_sizes, sent_sizes=ctx.received_sizes)
        return back, None, None, None


def all_to_all(rows: Tensor, group: RankGroup, *, received_sizes: list[int], sent_sizes: list[int]) -> Tensor:
    """Runs of rows to the ranks and theirs to this one, see `RankGroup.all_to_all`."""
    return _AllToAll.apply(rows, group, received_sizes, sent_sizes)
