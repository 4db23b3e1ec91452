"""Degrees of parallelism: group `parallel`."""

from dataclasses import dataclass
from typing import Literal

from megaasync.config.schema.ranges import ranged


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of parallelism; their product is the number of ranks.

    Attributes:
        data: a number, or `auto` for what the launched ranks leave (1 when started bare).
        expert: ranks over which experts are spread; they hold different sequences, as those of `data` do.
        sequence_parallel: between layers, tensor-parallel ranks hold a part of the sequence each.
        virtual_stages: stages per pipeline rank; null takes what the schedule needs: 2 for interleaved ones, zbv and
            wpipe, else 1.
        layers_per_stage: layers of each stage, in the order of the model; null deals them so that the most expensive
            stage, embedding and head included, is as cheap as it can be.
        timeout_seconds: longest wait for another rank's message; then the run ends and says who was waited for.
    """

    tensor: int = ranged(at_least=1)
    expert: int = ranged(at_least=1)
    pipeline: int = ranged(at_least=1)
    data: int | Literal["auto"] = ranged(at_least=1)
    sequence_parallel: bool
    virtual_stages: int | None = ranged(at_least=1)
    layers_per_stage: tuple[int, ...] | None
    timeout_seconds: float = ranged(above=0)
