"""The mesh of ranks: torch's DeviceMesh over the layout's axes, and further groups along them.

Whatever runs in a thread of its own needs groups of its own, so groups are made on demand. Every rank makes the same
kinds of groups in the same order, each those that it is a member of.
"""

from datetime import timedelta

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megaasync.config.parallel_dims import AXES, ParallelDims
from megaasync.distributed.rank_group import ALONE, RankGroup


class Mesh:
    """The mesh as one rank sees it; the default process group must be there if there are several ranks.

    Attributes:
        dims: sizes of the axes.
        rank: this rank.
        device_mesh: torch's; None for a single rank.
    """

    def __init__(self, dims: ParallelDims, *, rank: int, device_type: str, timeout: timedelta) -> None:
        """Lay the ranks out.

        Args:
            dims: sizes of the axes.
            rank: this rank.
            device_type: cpu or cuda.
            timeout: longest wait for other ranks.
        """
        self.dims, self.rank = dims, rank
        self._timeout = timeout
        self._wait = timeout if device_type == "cpu" else None  # NCCL's own watchdog ends a hung process
        sizes = tuple(getattr(dims, axis) for axis in AXES)
        several = dims.world_size > 1
        self.device_mesh: DeviceMesh | None = (
            init_device_mesh(device_type, sizes, mesh_dim_names=AXES) if several else None
        )

    def coordinate(self, axis: str) -> int:
        """Where this rank stands on an axis."""
        return self.dims.coordinate(self.rank, axis)

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one in these axes only."""
        return self.dims.ranks_along(self.rank, axes)

    def axis_group(self, axis: str) -> RankGroup:
        """The DeviceMesh's own group of an axis: for what the layers send."""
        size = getattr(self.dims, axis)
        if size == 1:
            return ALONE
        return RankGroup(self.device_mesh.get_group(axis), self.coordinate(axis), size, self._wait)

    def new_group(self, *axes: str) -> RankGroup:
        """A further group along some axes, for one use."""
        return self._new_group(self.ranks_along(*axes))

    def new_group_of_ends(self) -> RankGroup:
        """The first and the last pipeline rank of this rank's pipeline; ranks in between get one of their own."""
        pipeline = self.ranks_along("pipeline")
        ends = tuple(sorted({pipeline[0], pipeline[-1]}))
        return self._new_group(ends if self.rank in ends else (self.rank,))

    def _new_group(self, ranks: tuple[int, ...]) -> RankGroup:
        if self.dims.world_size == 1:
            return ALONE
        # made even for one rank: torch names a group by its ranks and by how many groups there are
        group = dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True)
        if len(ranks) == 1:
            return ALONE
        return RankGroup(group, ranks.index(self.rank), len(ranks), self._wait)
