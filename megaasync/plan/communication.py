"""What the ranks send in one step, by kind: bytes handed to each collective or message, summed over all ranks.

What a rank hands in for itself counts too. A test counts the same on a running process group. With a capacity factor
the experts' figure is an upper bound.
"""

import itertools
import math
from collections.abc import Sequence

from megaasync.config.schema import Config
from megaasync.models.transformer import TIED_PARAMETER, is_moe_layer
from megaasync.optim.expert_balance import NUM_LOSSES
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.pipeline.step_stats import StepStats
from megaasync.plan.sizes import REPLICAS
from megaasync.schedules import PipelineSchedule

_LONG = 8  # bytes of an int64 or a float64


def _tensor_bytes(config: Config, layers: range, *, compute: int, exact: int) -> int:
    """One tensor-parallel rank, one microbatch, forward and backward."""
    model, moe, size = config.model, config.model.moe, config.parallel.tensor
    tokens = config.train.micro_batch_size * model.seq_length
    whole, part = (count * model.hidden_size * compute for count in (tokens, tokens // size))
    # into a split layer and out of it: with the sequence in parts, a gather one way is a scattered sum the other way
    one_way = whole + part if config.parallel.sequence_parallel else whole
    total = 0
    for layer in layers:
        total += 2 * one_way  # attention
        if not is_moe_layer(model, layer):
            total += 2 * one_way
            continue
        if moe.num_shared_experts:
            total += 2 * one_way
        if not config.parallel.sequence_parallel:
            total += 2 * part
        if moe.sequence_balance_loss:
            total += config.train.micro_batch_size * moe.num_experts * exact
    if layers.start == 0:
        total += one_way
    if layers.stop == model.num_layers:
        total += one_way + 3 * tokens * exact
    return total


def _expert_bytes(config: Config, layers: range, *, compute: int) -> int:
    """One rank on average, one microbatch: counts, then rows there and back, forward and backward."""
    model, moe = config.model, config.model.moe
    tokens = config.train.micro_batch_size * model.seq_length // config.parallel.tensor
    rows = 4 * tokens * moe.top_k * model.hidden_size * compute
    return sum(moe.num_experts * _LONG + rows for layer in layers if is_moe_layer(model, layer))


def _home_elements(layout: FlatParamLayout) -> int:
    """Elements that one rank sends to gather split matrices on their owners, and to scatter their directions."""
    count = 0
    for run in layout.groups:
        if run.owners is not None:
            count += run.end - run.start + math.prod(run.state_shape)
    return count


def step_volumes(
    config: Config,
    schedule: PipelineSchedule,
    layers_of_stages: Sequence[range],
    layouts: Sequence[Sequence[FlatParamLayout]],
    *,
    compute: int,
    exact: int,
) -> dict[str, int]:
    """Bytes that all ranks together send in one step, by kind of communication.

    Args:
        config: of the run.
        schedule: of most of its steps.
        layers_of_stages: layers of each stage.
        layouts: of each stage, on each of the ranks that run it.
        compute: bytes of a number in the run's dtype.
        exact: bytes of a number in at least float32.
    """
    model, parallel, dims = config.model, config.parallel, config.parallel_dims
    replicas, microbatches = dims.size(REPLICAS), config.num_microbatches
    owners = schedule.rank_of_stage
    crossings = 2 * sum(owner != other for owner, other in itertools.pairwise(owners))
    parts = parallel.tensor if parallel.sequence_parallel else 1
    message = config.train.micro_batch_size * (model.seq_length // parts) * model.hidden_size * compute
    volumes = dict.fromkeys(
        ("pipeline", "tensor", "experts", "gradients", "weights", "whole matrices", "expert loads", "norm", "tied"), 0
    )
    volumes["pipeline"] = crossings * microbatches * message * replicas
    for layers, replicas_layouts in zip(layers_of_stages, layouts, strict=True):
        if parallel.tensor > 1:
            volumes["tensor"] += replicas * microbatches * _tensor_bytes(config, layers, compute=compute, exact=exact)
        if parallel.expert > 1 and model.moe:
            volumes["experts"] += replicas * microbatches * _expert_bytes(config, layers, compute=compute)
        moe_layers = sum(is_moe_layer(model, layer) for layer in layers)
        if replicas > 1 and moe_layers:
            volumes["expert loads"] += replicas * (moe_layers * model.moe.num_experts + NUM_LOSSES) * _LONG
        for layout in replicas_layouts:
            for bucket in layout.buckets:
                if dims.size(bucket.axes) > 1:
                    volumes["gradients"] += bucket.size * exact
                    volumes["weights"] += (bucket.local_shard.stop - bucket.local_shard.start) * compute
            volumes["whole matrices"] += _home_elements(layout) * exact
    if dims.world_size > 1:
        terms = StepStats.length(num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches)
        volumes["norm"] = dims.world_size * terms * _LONG
    if schedule.clip == "stage" and replicas > 1:
        volumes["norm"] += replicas * schedule.num_stages * 2 * _LONG
    if schedule.is_tied and owners[0] != owners[-1]:
        for layout in itertools.chain(layouts[0], layouts[-1]):
            bucket = layout.bucket_of(TIED_PARAMETER)
            volumes["tied"] += (bucket.local_shard.stop - bucket.local_shard.start) * exact
    return volumes
