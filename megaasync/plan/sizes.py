"""What each rank of a layout holds, from shapes alone: layers, parameters, their flat layout, what a schedule needs."""

from dataclasses import dataclass
from functools import cached_property

import torch

from megaasync.config.pipeline import phases_of
from megaasync.config.schema import Config
from megaasync.distributed.sharding import Shape, Sharding
from megaasync.models.activations import ActivationSizes
from megaasync.models.initialize import Part
from megaasync.models.parameters import roles_of, sharding_of
from megaasync.models.partition import partition_layers
from megaasync.models.transformer import TIED_PARAMETER, stage_shapes
from megaasync.nn.precision import at_least_float32
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import Route, route_parameters
from megaasync.schedules import Phase, PipelineSchedule, buffer_counts

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
REPLICAS = ("data", "expert", "tensor")  # the axes whose ranks run the same stages


@dataclass(frozen=True, slots=True)
class StageBuffers:
    """What each stage must hold, over all phases of a run: weight versions, gradient sums, microbatches in flight."""

    versions: tuple[int, ...]
    gradient_buffers: tuple[int, ...]
    activations: tuple[int, ...]


def buffers_required(phases: tuple[Phase, ...]) -> StageBuffers:
    """The most that any phase needs."""
    figures = [buffer_counts(phase.schedule) for phase in phases]

    def most(name: str) -> tuple[int, ...]:
        return tuple(max(column) for column in zip(*(getattr(figure, name) for figure in figures), strict=True))

    return StageBuffers(most("versions"), most("gradient_buffers"), most("activations"))


def layers_of_stages(config: Config) -> tuple[range, ...]:
    """Layers of each stage, as the config assigns them."""
    num_stages = phases_of(config)[0].schedule.num_stages
    return partition_layers(config.model, num_stages=num_stages, layers_per_stage=config.parallel.layers_per_stage)


def activation_sizes(config: Config) -> ActivationSizes:
    """What the bytes of activations depend on."""
    dtype = DTYPES[config.train.dtype]
    return ActivationSizes(
        tokens=config.train.micro_batch_size * config.model.seq_length,
        compute=dtype.itemsize,
        exact=at_least_float32(dtype).itemsize,
        tensor=config.parallel.tensor,
        sequence_parallel=config.parallel.sequence_parallel,
        expert=config.parallel.expert,
        recompute=config.train.recompute,
        loss_chunk_tokens=config.train.loss_chunk_tokens,
        mask_length=config.model.seq_length if config.train.document_mask else 0,
    )


class StageSizes:
    """One stage of a layout.

    Attributes:
        layers: of the whole model.
        tied: name of the embedding, if this stage shares it with another one.
    """

    def __init__(self, config: Config, schedule: PipelineSchedule, *, index: int) -> None:
        self._config = config
        self.layers = layers_of_stages(config)[index]
        is_end = index in (0, schedule.num_stages - 1)
        self.tied = TIED_PARAMETER if schedule.is_tied and is_end else None

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the whole parameters of this stage, by name."""
        return stage_shapes(self._config.model, self.layers)

    @cached_property
    def shardings(self) -> dict[str, Sharding]:
        """How each parameter lies over the ranks, by name."""
        in_parts = self._config.parallel.sequence_parallel
        return {name: sharding_of(name, sequence_parallel=in_parts) for name in self.shapes}

    @cached_property
    def routes(self) -> dict[str, Route]:
        """Rule and weight decay of each parameter, by name."""
        return route_parameters(roles_of(self.shapes), self._config.optimizer)

    def parts(self, *, rank: int) -> dict[str, Part]:
        """What a rank has of each parameter."""
        dims = self._config.parallel_dims
        return {name: self.shardings[name].local_ranges(s, dims, rank=rank) for name, s in self.shapes.items()}

    def flat_layout(self, *, rank: int) -> FlatParamLayout:
        """Where a rank's parts of the parameters lie in its flat buffers."""
        return FlatParamLayout(
            {name: tuple(map(len, part)) for name, part in self.parts(rank=rank).items()},
            self.routes,
            shardings=self.shardings,
            dims=self._config.parallel_dims,
            rank=rank,
            dedicated_buckets=() if self.tied is None else (self.tied,),
        )
