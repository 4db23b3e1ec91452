"""Runs of flattened tensors as boxes, and boxes through torch.distributed.checkpoint to another cut."""

import math

import pytest
import torch

from megaasync.checkpoint import dcp_io
from megaasync.checkpoint.chunks import TensorChunks, chunks_of_range
from megaasync.config import ConfigError


@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 6), (6, 1), (2, 3, 4)])
def test_boxes_are_the_run(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for end in range(start, whole.numel() + 1):
            found = []
            for offsets, sizes, first in chunks_of_range(shape, start, end):
                box = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
                assert box[0] == first
                found += box.tolist()
            assert found == list(range(start, end))
            assert len(list(chunks_of_range(shape, start, end))) <= 2 * len(shape) - 1


def test_a_row_cut_is_read_by_a_column_cut(tmp_path):
    whole = torch.randn(5, 6)
    written = TensorChunks((5, 6), torch.float32)
    for start, end in ((0, 4), (4, 19), (19, 30)):
        run = whole.flatten()[start:end].clone()
        written.add_run(run, local_shape=(5, 6), local_offsets=(0, 0), start=start)
    dcp_io.write({"w": written}, tmp_path, group=None)
    into = torch.full((15,), torch.nan)
    read = TensorChunks((5, 6), torch.float32)
    read.add_run(into[:7], local_shape=(5, 3), local_offsets=(0, 3), start=0)
    read.add_run(into[7:], local_shape=(5, 3), local_offsets=(0, 3), start=7)
    dcp_io.load({"w": read}, tmp_path, group=None)
    assert torch.equal(into.view(5, 3), whole[:, 3:])
    assert dcp_io.tensors_in(tmp_path) == {"w": (5, 6)}
    with pytest.raises(ConfigError, match="has no v, so another model or optimizer made it"):
        dcp_io.load({"v": read}, tmp_path, group=None)
    with pytest.raises(ConfigError, match=r"w has shape \[5, 6\], but \[5, 7\] here"):
        dcp_io.load({"w": TensorChunks((5, 7), torch.float32)}, tmp_path, group=None)
