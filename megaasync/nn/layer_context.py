"""How layers are computed, where that changes no result beyond rounding."""

from dataclasses import dataclass

from megaasync.kernels.backend import Kernels
from megaasync.nn.recompute import NO_RECOMPUTE, Recompute
from megaasync.nn.torch_kernels import TORCH_KERNELS


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Handed to every layer.

    Attributes:
        kernels: what layers are made of.
        recompute: which activations are made again in the backward.
        loss_chunk_tokens: tokens whose logits are held at once; None for all of a microbatch.
    """

    kernels: Kernels = TORCH_KERNELS
    recompute: Recompute = NO_RECOMPUTE
    loss_chunk_tokens: int | None = None


DEFAULT_CONTEXT = LayerContext()
