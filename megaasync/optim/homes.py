"""Matrices that are split over tensor-parallel ranks: whole at one home rank for their update, and back.

Every matrix is orthogonalised whole and once (OPTIMIZERS.md section 4, "TP home"), with the same numbers as on one
rank. Ranks without a matrix take part in the exchange all the same.
"""

from torch import Tensor

from megaasync.distributed.rank_group import RankGroup
from megaasync.optim.flat_layout import Homes


def bring_home(parts: Tensor, homes: Homes, group: RankGroup) -> Tensor:
    """Parts [n, rows, cols] of n matrices on each rank to the whole matrices that are at home here."""
    ranks, mine = len(homes.counts), homes.counts[homes.index]
    received = parts.new_empty(ranks * mine, *parts.shape[1:])
    group.all_to_all(received, parts, received_sizes=[mine] * ranks, sent_sizes=list(homes.counts))
    by_matrix = received.view(ranks, mine, *parts.shape[1:]).movedim(0, 1 + homes.dim)
    return by_matrix.flatten(1 + homes.dim, 2 + homes.dim)


def send_back(whole: Tensor, homes: Homes, group: RankGroup) -> Tensor:
    """The reverse of `bring_home`: [n at home here, whole rows, whole cols] to this rank's parts of all n."""
    ranks, mine = len(homes.counts), homes.counts[homes.index]
    parts = whole.unflatten(1 + homes.dim, (ranks, -1)).movedim(1 + homes.dim, 0).flatten(0, 1).contiguous()
    received = parts.new_empty(sum(homes.counts), *parts.shape[1:])
    group.all_to_all(received, parts, received_sizes=list(homes.counts), sent_sizes=[mine] * ranks)
    return received
