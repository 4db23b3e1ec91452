"""What a rank says whose device has no memory left."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megaasync.config.schema import Config
from megaasync.pipeline import MemoryFullError
from megaasync.plan.plan import make_plan
from megaasync.plan.text import size_text


@contextmanager
def explained_memory(config: Config, *, rank: int) -> Iterator[None]:
    """Report running out of memory inside with the rank, its place, what the plan counts, and what to set.

    Raises:
        MemoryFullError: in the place of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        line = make_plan(config)["ranks"][config.parallel_dims.coordinate(rank, "pipeline")]
        stages = ", ".join(map(str, line["stages"]))
        first = str(error).split(". GPU")[0].splitlines()[0].rstrip(".")
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        raise MemoryFullError(
            f"rank {rank} (stage {stages}): {first}{notes}; the plan counts {size_text(line['total_bytes'])} for it, "
            "without CUDA's context, communicators and fragments. Set train.recompute=selective or full, lower "
            "train.micro_batch_size, or raise parallel.pipeline, parallel.expert or parallel.tensor"
        ) from error
