"""Degrees of parallelism: group `parallel`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaasync.fields import Range


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of parallelism; their product is the number of ranks.

    Attributes:
        data: a number, or `auto` for what the launched ranks leave (1 when started bare).
        expert: ranks over which experts are spread; they hold different sequences, as those of `data` do.
        sequence_parallel: between layers, tensor-parallel ranks hold a part of the sequence each.
        virtual_stages: stages per pipeline rank; null takes what the schedule needs: 2 for interleaved ones, zbv and
            wpipe, else 1.
        layers_per_stage: layers of each stage, in the order of the model; null assigns them so that the most expensive
            stage, embedding and head included, is as cheap as it can be.
        p2p_channels: most NCCL channels, and so blocks of a GPU, for the messages between two ranks; null leaves that
            to NCCL.
        timeout_seconds: longest wait for another rank's message; then the run ends and says who was waited for.
    """

    tensor: Annotated[int, Range(at_least=1)]
    expert: Annotated[int, Range(at_least=1)]
    pipeline: Annotated[int, Range(at_least=1)]
    data: Annotated[int | Literal["auto"], Range(at_least=1)]
    sequence_parallel: bool
    virtual_stages: Annotated[int | None, Range(at_least=1)]
    layers_per_stage: tuple[int, ...] | None
    timeout_seconds: Annotated[float, Range(above=0)]
    p2p_channels: Annotated[int | None, Range(at_least=1)] = None
