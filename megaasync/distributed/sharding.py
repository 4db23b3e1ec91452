"""How a tensor lies over the mesh of ranks."""

from dataclasses import dataclass
from typing import Literal

from megaasync.config.parallel_dims import AXES, ParallelDims, local_range

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one parameter lies over the ranks of its pipeline stage.

    Attributes:
        axis: over which it is split; None if every rank has all of it.
        dim: the dimension that is split.
        reduced_over: axes over which gradients are summed: their ranks saw different tokens.
    """

    axis: Literal["tensor", "expert"] | None
    dim: int
    reduced_over: tuple[str, ...]

    def local_shape(self, shape: Shape, dims: ParallelDims, *, rank: int) -> Shape:
        """Shape of a rank's part."""
        return tuple(len(side) for side in self.local_ranges(shape, dims, rank=rank))

    def local_ranges(self, shape: Shape, dims: ParallelDims, *, rank: int) -> tuple[range, ...]:
        """A rank's part, one range per dimension."""
        ranges = [range(length) for length in shape]
        if self.axis is not None:
            index, count = dims.coordinate(rank, self.axis), getattr(dims, self.axis)
            ranges[self.dim] = local_range(shape[self.dim], index=index, count=count)
        return tuple(ranges)

    @property
    def copies_over(self) -> tuple[str, ...]:
        """Axes whose ranks hold the same part and the same summed gradient without having summed it."""
        return tuple(axis for axis in AXES[1:] if axis != self.axis and axis not in self.reduced_over)
