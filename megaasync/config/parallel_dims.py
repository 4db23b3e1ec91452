"""Where each rank stands: the ranks as a mesh, tensor innermost, so that the ranks that talk most are neighbours."""

import math
from dataclasses import astuple, dataclass

AXES = ("pipeline", "data", "expert", "tensor")  # outermost first, as the fields of ParallelDims


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Sizes of the axes; rank = ((pipeline x data + data) x expert + expert) x tensor + tensor."""

    pipeline: int = 1
    data: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(astuple(self))

    def size(self, axes: tuple[str, ...]) -> int:
        """Ranks along some axes together."""
        return math.prod(getattr(self, axis) for axis in axes)

    def effective(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of some axes that have more than one rank."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    def _stride(self, axis: str) -> int:
        return math.prod(getattr(self, inner) for inner in AXES[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Where a rank stands on an axis."""
        return rank // self._stride(axis) % getattr(self, axis)

    def index(self, rank: int, axes: tuple[str, ...]) -> int:
        """Which one a rank is of `ranks_along`."""
        index = 0
        for axis in AXES:
            if axis in axes:
                index = index * getattr(self, axis) + self.coordinate(rank, axis)
        return index

    def ranks_along(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` in these axes only, itself included, in ascending order."""
        ranks = [rank - sum(self.coordinate(rank, axis) * self._stride(axis) for axis in axes)]
        for axis in AXES:
            if axis in axes:
                ranks = [base + i * self._stride(axis) for base in ranks for i in range(getattr(self, axis))]
        return tuple(ranks)


def local_range(length: int, *, index: int, count: int) -> range:
    """Part `index` of a length cut into `count` parts; the first ones are longer by one where it does not divide."""
    base, longer = divmod(length, count)
    start = index * base + min(index, longer)
    return range(start, start + base + (index < longer))
