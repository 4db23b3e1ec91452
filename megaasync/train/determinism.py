"""`train.deterministic`: the same bits from the same start, on the same GPUs and software."""

import torch


def repeat_exactly() -> None:
    """Have torch take deterministic algorithms, and raise where it has none.

    With it, the backward of flash attention sums in one order. What the environment must say before CUDA starts is in
    `megaasync.distributed.gpu_environment`. On a CPU runs repeat without it.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
