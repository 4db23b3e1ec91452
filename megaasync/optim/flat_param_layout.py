"""Where each parameter lies in one flat buffer, and which part of it each rank steps.

Parameters whose gradients are summed over the same ranks share a bucket. A bucket is as many shards as there are such
ranks: each shard of its gradient is summed on the rank that steps it (ZeRO-1, arXiv 1910.02054), and the new weights
are gathered. Elementwise rules take any cut, so their shards are equal; a matrix lies whole in one shard, so that Muon
sees it whole, and the shards are filled so that every rank has about the same Newton-Schulz work. A stack of experts
may be cut between two.

Within a shard, parameters of one rule and decay lie together, and matrices of equal shape as a stack that one batched
Newton-Schulz takes: a step is a few kernels and not a Python loop over tensors.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megaasync.config.parallel_dims import ParallelDims, local_range
from megaasync.distributed.sharding import Shape, Sharding
from megaasync.optim.routing import Route
from megaasync.update_rules.update_rule import UpdateRule

ALIGNMENT = 64  # elements; where buckets start, and runs of different rules or shapes in them, if nothing is cut
SCRATCH = 1 << 25  # elements that one part of a step takes; its scratch is up to five times that
CACHED_SCRATCH = 1 << 18  # the same on a CPU, where a part that stays in its cache takes a third of the time
_WHOLE = Sharding(None, 0, ())


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class MatrixOwners:
    """Matrices that are split over tensor-parallel ranks, and to which of them each goes to be whole for its update.

    Attributes:
        dim: of the matrix, 0 or 1, that is split.
        counts: matrices that go to each rank, in the order in which they lie.
        index: of this rank.
    """

    dim: int
    counts: tuple[int, ...]
    index: int

    def whole_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the whole matrices."""
        rows, cols = shape
        return (rows * len(self.counts), cols) if self.dim == 0 else (rows, cols * len(self.counts))


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A contiguous range of this rank's shard of a bucket that one rule steps at once.

    Attributes:
        start, end: elements in the flat buffer.
        shard_offset: where it begins in buffers that hold this rank's shards only.
        matrix_shape: (rows, cols) of the stacked matrices, or None for a flat run of elements.
        owners: if the matrices are parts of matrices split over tensor-parallel ranks.
    """

    rule: UpdateRule
    weight_decay: float
    start: int
    end: int
    shard_offset: int
    matrix_shape: tuple[int, int] | None
    owners: MatrixOwners | None

    def _shaped(self, run: Tensor) -> Tensor:
        return run if self.matrix_shape is None else run.view(-1, *self.matrix_shape)

    def view(self, flat: Tensor) -> Tensor:
        """[n, rows, cols] or [n], as the rule wants it, of a buffer of all local parameters."""
        return self._shaped(flat[self.start : self.end])

    def view_shard(self, shard: Tensor) -> Tensor:
        """[n, rows, cols] or [n] of a buffer that holds this rank's shards only."""
        return self._shaped(shard[self.shard_offset : self.shard_offset + self.end - self.start])

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of what this rank's rule steps: of a split matrix, the whole ones that are owned here."""
        if self.owners is not None:
            return (self.owners.counts[self.owners.index], *self.owners.whole_shape(self.matrix_shape))
        length = self.end - self.start
        return (length,) if self.matrix_shape is None else (length // math.prod(self.matrix_shape), *self.matrix_shape)


def iter_chunks(shape: tuple[int, ...], at_most: int = SCRATCH) -> Iterator[slice]:
    """Slices of the first dimension that a step takes one at a time, of about so many elements at most."""
    rows = max(at_most // max(math.prod(shape[1:]), 1), 1)
    return (slice(at, min(at + rows, shape[0])) for at in range(0, shape[0], rows))


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of the flat buffer that is shared out among the ranks along some axes.

    Attributes:
        axes: along which gradients are summed.
        shards: each rank's place in the flat buffer, without gaps between them.
        index: of this rank.
        shard_offset: where the shard begins in buffers that hold this rank's shards only.
        copies: ranks that hold the same summed gradient without sharing it out among them.
    """

    axes: tuple[str, ...]
    shards: tuple[slice, ...]
    index: int
    shard_offset: int
    copies: int

    @property
    def local_shard(self) -> slice:
        """Where this rank's shard lies in the flat buffer."""
        return self.shards[self.index]

    @property
    def size(self) -> int:
        """Elements of all shards."""
        return self.shards[-1].stop - self.shards[0].start


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter of a matrix rule: a matrix or a stack of them."""

    name: str
    size: int
    shape: tuple[int, int]
    dim: int | None  # split over tensor-parallel ranks
    cost: int  # of its Newton-Schulz, in multiples of p^2 q of the whole matrices


def assign_balanced(costs: Sequence[int], loads: list[int]) -> list[int]:
    """An owner for each cost: the largest first, each to the owner with the least so far; adds to their loads."""
    num_owners, owners = len(loads), [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        owners[number] = min(range(num_owners), key=lambda owner: (loads[owner], owner))
        loads[owners[number]] += costs[number]
    return owners


class FlatParamLayout:
    """The layout of one stage's parameters on one rank.

    Attributes:
        names: parameters in the order they were given.
        size: elements of a buffer of all local parameters, padding included.
        shard_size: elements of a buffer of this rank's shards.
        buckets: what is reduced and gathered together.
        groups: this rank's shards, cut by rule, decay and matrix shape.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        routes: Mapping[str, Route],
        *,
        shardings: Mapping[str, Sharding] | None = None,
        dims: ParallelDims | None = None,
        rank: int = 0,
        dedicated_buckets: Collection[str] = (),
    ) -> None:
        """A layout.

        Args:
            shapes: of the parameters, as this rank holds them.
            routes: their rules.
            shardings: how they lie over the ranks; None for a single rank.
            dims: sizes of the axes; None for a single rank.
            rank: this one.
            dedicated_buckets: parameters that get a bucket of their own.
        """
        self.names = tuple(shapes)
        self._shapes, self._routes = dict(shapes), routes
        self._dims, self._rank = dims or ParallelDims(), rank
        self._shardings = shardings or dict.fromkeys(shapes, _WHOLE)
        self._starts: dict[str, int] = {}
        self.size = self.shard_size = 0
        buckets: list[Bucket] = []
        groups: list[ParamGroup] = []
        members: dict[tuple, list[str]] = {}
        for name in self.names:
            sharding, is_matrix = self._shardings[name], routes[name].is_matrix_rule
            axes, copies_over = map(self._dims.effective, (sharding.reduced_over, sharding.copies_over))
            is_stack = is_matrix and len(shapes[name]) == 3  # stacks can be cut, so they stay apart
            own = name if name in dedicated_buckets else None
            members.setdefault((axes, copies_over, is_matrix, is_stack, own), []).append(name)
        self._dedicated_buckets: dict[str, Bucket] = {}
        self._loads: dict[tuple[str, ...], list[int]] = {}  # Newton-Schulz work of each shard so far, by axes
        # stacks first: what they leave uneven, whole matrices can make up for
        for (axes, copies_over, is_matrix, _, own), names in sorted(
            members.items(), key=lambda member: not member[0][3]
        ):
            loads = self._loads.setdefault(axes, [0] * self._dims.size(axes))
            place = self._place_matrices if is_matrix else self._place_elements
            index = self._dims.index(rank, axes)
            lengths, found = place(names, loads, index)
            ends = list(itertools.accumulate(lengths, initial=self.size))
            shards = tuple(slice(start, end) for start, end in itertools.pairwise(ends))
            bucket = Bucket(axes, shards, index, self.shard_size, self._dims.size(copies_over))
            buckets.append(bucket)
            if own is not None:
                self._dedicated_buckets[own] = bucket
            groups += found
            self.size, self.shard_size = _aligned(ends[-1]), _aligned(self.shard_size + lengths[index])
        self.buckets, self.groups = tuple(buckets), tuple(groups)

    def _run(self, key: tuple, start: int, end: int, *, shard_start: int) -> ParamGroup:
        rule, weight_decay, matrix_shape, owners = key
        return ParamGroup(rule, weight_decay, start, end, self.shard_size + start - shard_start, matrix_shape, owners)

    def _place_elements(self, names: list[str], loads: list[int], index: int) -> tuple[list[int], list[ParamGroup]]:
        """Put parameters of elementwise rules one after another; shards are equal and cut anywhere.

        Returns, as the other two do, the lengths of the shards and the runs of this rank's.
        """
        groups: dict[tuple, list[str]] = {}
        for name in names:
            route = self._routes[name]
            groups.setdefault((route.rule, route.weight_decay, None, None), []).append(name)
        at, ends = self.size, []
        for key, group in groups.items():
            start = at
            for name in group:
                self._starts[name] = at
                at += math.prod(self._shapes[name])
            ends.append((key, start, at))
            at = _aligned(at)
        num_shards = len(loads)
        shard = _aligned(-(-(at - self.size) // num_shards))
        first = self.size + index * shard
        runs = [
            self._run(key, max(start, first), min(end, first + shard), shard_start=first)
            for key, start, end in ends
            if max(start, first) < min(end, first + shard)
        ]
        return [shard] * num_shards, runs

    def _matrix(self, name: str) -> _Matrix:
        shape = self._shapes[name]
        rows, cols = shape[-2:]
        sharding = self._shardings[name]
        is_split = sharding.axis == "tensor" and self._dims.tensor > 1
        whole = [rows, cols]
        if is_split:
            whole[sharding.dim] *= self._dims.tensor
        cost = math.prod(shape[:-2]) * max(whole) * min(whole) ** 2
        return _Matrix(name, math.prod(shape), (rows, cols), sharding.dim if is_split else None, cost)

    def _place_matrices(self, names: list[str], loads: list[int], index: int) -> tuple[list[int], list[ParamGroup]]:
        """Assign matrices and stacks of them to shards by cost, and those split over tensor ranks to owner ranks."""
        matrices = [self._matrix(name) for name in names]
        are_stacks = all(len(self._shapes[name]) == 3 for name in names)  # [E, rows, cols]
        if are_stacks and len({tuple(sorted(matrix.shape)) for matrix in matrices}) == 1:
            return self._place_evenly(matrices, loads, index)
        shard_of = assign_balanced([matrix.cost for matrix in matrices], loads)
        used: list[int] = []
        plans: list[list[tuple[tuple, int, int]]] = []  # per shard: key, start and end within it
        offsets: dict[str, tuple[int, int]] = {}
        for shard in range(len(loads)):
            mine = [matrix for matrix, its_shard in zip(matrices, shard_of, strict=True) if its_shard == shard]
            owners = assign_balanced([m.cost if m.dim is not None else 0 for m in mine], [0] * self._dims.tensor)
            groups: dict[tuple, list[tuple[int, _Matrix]]] = {}
            for matrix, owner in zip(mine, owners, strict=True):
                route = self._routes[matrix.name]
                key = (route.rule, route.weight_decay, matrix.shape, matrix.dim)
                groups.setdefault(key, []).append((owner, matrix))
            at, plan = 0, []
            for (rule, decay, shape, dim), group in groups.items():
                start = at
                for _, matrix in group:
                    offsets[matrix.name] = shard, at
                    at += matrix.size
                # of equal matrices it does not matter which one goes to which owner, only how many
                counts = tuple(sum(owner == rank for owner, _ in group) for rank in range(self._dims.tensor))
                here = self._dims.coordinate(self._rank, "tensor")
                plan.append(((rule, decay, shape, None if dim is None else MatrixOwners(dim, counts, here)), start, at))
                at = _aligned(at)
            used.append(at)
            plans.append(plan)
        firsts = list(itertools.accumulate(used, initial=self.size))
        for name, (shard, offset) in offsets.items():
            self._starts[name] = firsts[shard] + offset
        first = firsts[index]
        runs = [self._run(key, first + start, first + end, shard_start=first) for key, start, end in plans[index]]
        return used, runs

    def _place_evenly(
        self, matrices: list[_Matrix], loads: list[int], index: int
    ) -> tuple[list[int], list[ParamGroup]]:
        """Put matrices of one size, as experts are, one after another: shards are cut between any two of them."""
        groups: dict[tuple, list[_Matrix]] = {}
        for matrix in matrices:
            route = self._routes[matrix.name]
            groups.setdefault((route.rule, route.weight_decay, matrix.shape, None), []).append(matrix)
        size = math.prod(matrices[0].shape)
        count = sum(matrix.size for matrix in matrices) // size
        lengths = [size * len(local_range(count, index=rank, count=len(loads))) for rank in range(len(loads))]
        for rank, length in enumerate(lengths):
            loads[rank] += length // size * max(matrices[0].shape) * min(matrices[0].shape) ** 2
        first = self.size + sum(lengths[:index])
        end = first + lengths[index]
        at, runs = self.size, []
        for key, group in groups.items():
            start = at
            for matrix in group:
                self._starts[matrix.name] = at
                at += matrix.size
            if max(start, first) < min(at, end):
                runs.append(self._run(key, max(start, first), min(at, end), shard_start=first))
        return lengths, runs

    def place_of(self, name: str) -> slice:
        """Where a parameter lies in the flat buffer."""
        start = self._starts[name]
        return slice(start, start + math.prod(self._shapes[name]))

    def bucket_of(self, name: str) -> Bucket:
        """The bucket of a parameter that has one of its own."""
        return self._dedicated_buckets[name]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat buffer, shaped, in the order of `names`."""
        return [flat[self.place_of(name)].view(shape) for name, shape in self._shapes.items()]

    @property
    def scratch_elements(self) -> int:
        """Numbers that a step needs for a moment, about: five times what it takes at once.

        That is a part of a run; of matrices that are split, all of a run, because their exchange is one.
        """
        most = 0
        for group in self.groups:
            part = max(
                (
                    math.prod(group.state_shape[1:]) * (chunk.stop - chunk.start)
                    for chunk in iter_chunks(group.state_shape)
                ),
                default=0,
            )
            whole = 0 if group.owners is None else 3 * (group.end - group.start)
            most = max(most, 5 * part + whole)
        return most

    def gather_shard(self, shard: Tensor, flat: Tensor) -> None:
        """Fill a buffer of this rank's shards from one of all local parameters."""
        for bucket in self.buckets:
            self._shard_view(shard, bucket).copy_(flat[bucket.local_shard])

    def scatter_shard(self, shard: Tensor, flat: Tensor) -> None:
        """Put this rank's shards into their places in a buffer of all local parameters."""
        for bucket in self.buckets:
            flat[bucket.local_shard].copy_(self._shard_view(shard, bucket))

    @staticmethod
    def _shard_view(shard: Tensor, bucket: Bucket) -> Tensor:
        return shard[bucket.shard_offset : bucket.shard_offset + bucket.local_shard.stop - bucket.local_shard.start]
