"""Parts of global tensors that a rank holds, as torch.distributed.checkpoint wants them: boxes with offsets.

A rank's share of a parameter is a run of its flattened local part, cut anywhere. Such a run is at most a few boxes: the
end of a row, whole rows, the beginning of a row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megaasync.distributed.sharding import Shape

if TYPE_CHECKING:  # importing torch.distributed.checkpoint takes a second, which runs that save nothing do not pay
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


def chunks_of_range(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape, int]]:
    """The boxes whose elements, one box after another, are elements [start, end) of a tensor in row-major order.

    Yields:
        (offsets, sizes, first element) of each.
    """
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,), start
        return
    row = math.prod(shape[1:])

    def inside(number: int, low: int, high: int) -> Iterator[tuple[Shape, Shape, int]]:
        for offsets, sizes, first in chunks_of_range(shape[1:], low, high):
            yield (number, *offsets), (1, *sizes), number * row + first

    first_row, first_left = divmod(start, row)
    last_row, last_left = divmod(end, row)
    if first_row == last_row:
        yield from inside(first_row, first_left, last_left)
        return
    if first_left:
        yield from inside(first_row, first_left, row)
        first_row += 1
    if last_row > first_row:
        zeros = (0,) * (len(shape) - 1)
        yield (first_row, *zeros), (last_row - first_row, *shape[1:]), first_row * row
    if last_left:
        yield from inside(last_row, 0, last_left)


@dataclass(slots=True)
class TensorChunks:
    """What this rank has of one global tensor.

    Attributes:
        shape: of the whole.
        dtype: of the whole.
        boxes: by offsets, views shaped as the boxes: read by a save, written by a load.
    """

    shape: Shape
    dtype: torch.dtype
    chunks: dict[Shape, Tensor] = field(default_factory=dict)

    def size(self) -> torch.Size:
        """Shape of the whole tensor, as torch.distributed.checkpoint asks for it."""
        return torch.Size(self.shape)

    def add_run(self, run: Tensor, *, local_shape: Shape, local_offsets: Sequence[int], start: int) -> None:
        """Add a run of the flattened local part.

        Args:
            run: [length] contiguous.
            local_shape: of the local part.
            local_offsets: of the local part in the whole.
            start: of the run in the flattened local part.
        """
        for offsets, sizes, first in chunks_of_range(local_shape, start, start + run.numel()):
            place = tuple(low + offset for low, offset in zip(local_offsets, offsets, strict=True))
            self.chunks[place] = run[first - start : first - start + math.prod(sizes)].view(sizes)

    def to_host(self) -> "TensorChunks":
        """Copy the chunks into host memory that nobody else writes to."""
        return TensorChunks(
            self.shape, self.dtype, {k: b.detach().to("cpu", copy=True) for k, b in self.chunks.items()}
        )

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's chunks."""
        return sum(box.nbytes for box in self.chunks.values())

    def _chunk(self, offsets: Shape) -> "ChunkStorageMetadata":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size(offsets), self.chunks[offsets].size())

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        """torch.distributed.checkpoint asks for it."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(self._chunk(offsets), properties, self.size()),
            )
            for offsets in self.chunks
        ]

    def chunk_metadata(self) -> "list[ChunkStorageMetadata]":
        """Offsets and sizes of the boxes."""
        return [self._chunk(offsets) for offsets in self.chunks]
