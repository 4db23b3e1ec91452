"""How activations enter and leave the layers that are split over tensor-parallel ranks.

Between layers each rank has the whole sequence, or its part of it under sequence parallelism (arXiv 2205.05198), which
costs the same traffic and keeps norms and residuals for one part only.
"""

from dataclasses import dataclass

from torch import Tensor

from megaasync.config.parallel_dims import local_range
from megaasync.distributed.differentiable import (
    copy_to_ranks,
    gather_for_shards,
    join_parts,
    scatter_of_shards,
    sum_of_ranks,
    take_part,
)
from megaasync.distributed.rank_group import ALONE, RankGroup


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The tensor axis as layers see it.

    Attributes:
        group: ranks among which each layer is split.
        sequence_parallel: between layers, each rank has its part of the sequence.
    """

    group: RankGroup = ALONE
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        """Ranks on the axis."""
        return self.group.size

    def share(self, length: int) -> int:
        """This rank's part of a length, the first ranks taking one more where it does not divide."""
        return len(local_range(length, index=self.group.index, count=self.group.size))

    def enter(self, x_BSD: Tensor) -> Tensor:
        """From between layers to the whole sequence, to be multiplied with this rank's shard."""
        if self.size == 1:
            return x_BSD
        return (gather_for_shards if self.sequence_parallel else copy_to_ranks)(x_BSD, self.group)

    def leave(self, x_BSD: Tensor) -> Tensor:
        """The sum of the shards' outputs, as it is held between layers."""
        if self.size == 1:
            return x_BSD
        return (scatter_of_shards if self.sequence_parallel else sum_of_ranks)(x_BSD, self.group)

    def enter_tokens(self, x_BSD: Tensor) -> Tensor:
        """From between layers to this rank's part of the sequence, for what each token does by itself."""
        if self.size == 1 or self.sequence_parallel:
            return x_BSD
        return take_part(x_BSD, self.group)

    def leave_tokens(self, x_BSD: Tensor) -> Tensor:
        """From what `enter_tokens` gave back to what is held between layers."""
        if self.size == 1 or self.sequence_parallel:
            return x_BSD
        return join_parts(x_BSD, self.group)

    def own_tokens(self, per_token_BS: Tensor) -> Tensor:
        """This rank's part of something known for the whole sequence, as `enter_tokens` takes it; no gradient."""
        if self.size == 1:
            return per_token_BS
        return per_token_BS.unflatten(1, (self.size, -1))[:, self.group.index]


NO_TENSOR_PARALLEL = TensorParallel()
