"""Matrices that are split over tensor-parallel ranks: whole on one owner rank for their update, and back.

Every matrix is orthogonalised whole and once, with the same numbers as on one rank (docs/method.md). Ranks that
own none take part in the exchange all the same.
"""

from torch import Tensor

from megaasync.distributed.rank_group import RankGroup
from megaasync.optim.flat_param_layout import MatrixOwners


def gather_to_owner(parts: Tensor, owners: MatrixOwners, group: RankGroup) -> Tensor:
    """Parts [n, rows, cols] of n matrices on each rank to the whole matrices that are owned here."""
    ranks, mine = len(owners.counts), owners.counts[owners.index]
    received = parts.new_empty(ranks * mine, *parts.shape[1:])
    group.all_to_all(received, parts, received_sizes=[mine] * ranks, sent_sizes=list(owners.counts))
    by_matrix = received.view(ranks, mine, *parts.shape[1:]).movedim(0, 1 + owners.dim)
    return by_matrix.flatten(1 + owners.dim, 2 + owners.dim)


def scatter_from_owner(whole: Tensor, owners: MatrixOwners, group: RankGroup) -> Tensor:
    """The reverse of `gather_to_owner`: [n owned here, whole rows, whole cols] to this rank's parts of all n."""
    ranks, mine = len(owners.counts), owners.counts[owners.index]
    parts = whole.unflatten(1 + owners.dim, (ranks, -1)).movedim(1 + owners.dim, 0).flatten(0, 1).contiguous()
    received = parts.new_empty(sum(owners.counts), *parts.shape[1:])
    group.all_to_all(received, parts, received_sizes=list(owners.counts), sent_sizes=[mine] * ranks)
    return received
