"""The plan: what a layout needs and how its pipeline will run, from shapes alone; no weights are made."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megaasync.config.parallel_dims import AXES
from megaasync.config.pipeline import phases_of
from megaasync.config.schema import Config, ModelConfig, Taylor
from megaasync.distributed.sharding import Shape
from megaasync.models.activations import ActivationSizes, stage_bytes, workspace
from megaasync.models.flops import flops_per_token, forward_flops
from megaasync.models.parameters import parameter_spec
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import Role
from megaasync.plan.communication import step_volumes
from megaasync.plan.sizes import REPLICAS, StageBuffers, StageSizes, activation_sizes, buffers_required
from megaasync.plan.text import size_text
from megaasync.schedules import (
    SCHEDULES,
    Costs,
    Phase,
    PipelineSchedule,
    ScheduleError,
    ScheduleMetrics,
    build_schedule,
    schedule_metrics,
)
from megaasync.update_rules.update_rule import state_elements

_HOP = 0.3  # of a forward
_GIB = 2**30
_RESERVE = 0.1  # of a GPU's memory, for what the plan does not count
_HBM_BYTES = 3.0e12  # per second, for the elementwise part of a step


def _has_gpus(config: Config) -> bool:
    """Whether the figures of a cluster's GPUs say anything about the run: a job without any has none of them."""
    cluster = config.cluster
    return cluster.name == "local" or (cluster.gpus_per_node is not None and config.device != "cpu")


def main_schedule(phases: tuple[Phase, ...]) -> PipelineSchedule:
    """The schedule that the config names, as against those of synchronous phases around it."""
    return max((phase.schedule for phase in phases), key=lambda schedule: schedule.is_asynchronous)


def hop_advice(config: Config) -> list[dict[str, float]]:
    """What a hop between stages would cost, as it is configured and with one more round of forwards in flight.

    Empty for one rank, and for schedules that have no extra forwards.
    """
    schedule, parallel = config.schedule, config.parallel
    if parallel.pipeline == 1 or not SCHEDULES[schedule.name].takes_extra_in_flight:
        return []
    advice = []
    for extra in (schedule.extra_in_flight, schedule.extra_in_flight + 1):
        with suppress(ScheduleError):
            table = build_schedule(
                schedule.name,
                num_ranks=parallel.pipeline,
                num_microbatches=config.num_microbatches,
                virtual_stages=parallel.virtual_stages,
                extra_in_flight=extra,
            )
            metrics = schedule_metrics(table, costs=Costs(hop=_HOP))
            line = {"extra_in_flight": extra, "hop": _HOP, "bubble": metrics.bubble}
            advice.append(line | {"most_in_flight": max(metrics.activations)})
    return advice


def count_parameters(shapes: Mapping[str, Shape], model: ModelConfig) -> tuple[int, int]:
    """(all, active per token): of the routed experts a token uses top_k."""
    total = active = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        total += count
        is_expert = parameter_spec(name).role is Role.EXPERTS
        active += count * model.moe.top_k // model.moe.num_experts if is_expert else count
    return total, active


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of a plan.

    Attributes:
        sizes: its parameters.
        layouts: of each rank that runs it.
        state_elements: numbers of optimizer state, of the rank with most.
        scratch_elements: numbers that a step needs for a moment, of the rank with most.
        per_microbatch: bytes of activations.
        workspace: bytes that the loss, or a layer that is made again, needs for a moment.
    """

    sizes: StageSizes
    layouts: tuple[FlatParamLayout, ...]
    state_elements: int
    scratch_elements: int
    per_microbatch: int
    workspace: int


def _state_elements(layout: FlatParamLayout, config: Config) -> int:
    of_rules = sum(state_elements(run.rule, run.state_shape) for run in layout.groups)
    remembers = isinstance(config.correction, Taylor) and config.correction.adaptive
    return of_rules + sum(run.end - run.start for run in layout.groups if remembers)


def _make_stage(config: Config, schedule: PipelineSchedule, index: int, activations: ActivationSizes) -> _Stage:
    sizes, dims = StageSizes(config, schedule, index=index), config.parallel_dims
    first = schedule.rank_of_stage[index] * dims.size(REPLICAS)
    layouts = tuple(sizes.flat_layout(rank=rank) for rank in dims.ranks_along(first, REPLICAS))
    layers = sizes.layers
    return _Stage(
        sizes,
        layouts,
        max(_state_elements(layout, config) for layout in layouts),
        max(layout.scratch_elements for layout in layouts),
        stage_bytes(config.model, layers, activations),
        workspace(config.model, layers, activations),
    )


def _bytes_of(stage: _Stage, needs: StageBuffers, index: int, activations: ActivationSizes) -> dict[str, int]:
    """Bytes by kind that the rank of a stage that holds most has."""
    local = max(layout.size for layout in stage.layouts)
    owned = max(layout.shard_size for layout in stage.layouts)
    return {
        "weights": local * activations.compute * needs.versions[index],
        "gradients": local * activations.exact * needs.gradient_buffers[index],
        "master": owned * activations.exact,
        "optimizer_state": stage.state_elements * activations.exact,
        "activations": stage.per_microbatch * needs.activations[index],
        "workspace": stage.workspace + stage.scratch_elements * activations.exact,
    }


def _over_1f1b(config: Config, stages: list[_Stage], needs: StageBuffers, activations: ActivationSizes) -> list[int]:
    """Bytes per stage that an asynchronous schedule holds over 1f1b of the same stages; empty if it has others."""
    schedule = build_schedule(
        "1f1b", num_ranks=config.parallel.pipeline, num_microbatches=config.num_microbatches, tied=False
    )
    if schedule.num_stages != len(stages):
        return []
    synchronous = buffers_required((Phase(schedule, 0, 1, flush_at_end=False),))
    return [
        sum(_bytes_of(stage, needs, i, activations).values())
        - sum(_bytes_of(stage, synchronous, i, activations).values())
        for i, stage in enumerate(stages)
    ]


def _newton_schulz_flops(stage: _Stage, config: Config) -> float:
    """Operations of Newton-Schulz on the rank with most: per iteration 4 p^2 q + 2 p^3 for p <= q rows or columns."""
    steps = getattr(config.optimizer, "newton_schulz_steps", 0)

    def of(layout: FlatParamLayout) -> float:
        total = 0.0
        for run in layout.groups:
            if run.matrix_shape is not None:
                count, *shape = run.state_shape
                short, long = min(shape), max(shape)
                total += count * (4 * short**2 * long + 2 * short**3)
        return steps * total

    return max(map(of, stage.layouts))


def _estimates(
    config: Config, stage: _Stage, metrics: ScheduleMetrics, index: int, activations: ActivationSizes
) -> dict[str, float]:
    """Seconds, from the figures that the cluster group gives for its GPUs; empty if it gives none."""
    cluster = config.cluster
    if not _has_gpus(config) or cluster.gpu_tflops is None or cluster.network_gbytes is None:
        return {}
    layers = stage.sizes.layers
    flops = forward_flops(config.model, layers, with_head=layers.stop == config.model.num_layers)
    forward = activations.tokens * flops / config.parallel.tensor / (cluster.gpu_tflops * 1e12)
    layout = max(stage.layouts, key=lambda candidate: candidate.size)
    reduce_bytes = gather_bytes = 0.0
    for bucket in layout.buckets:
        size = config.parallel_dims.size(bucket.axes)
        reduce_bytes += bucket.size * activations.exact * (size - 1) / size
        gather_bytes += bucket.size * activations.compute * (size - 1) / size
    elementwise = layout.shard_size * 8 * activations.exact / _HBM_BYTES
    return {
        "forward": forward,
        "slack": metrics.slack[index] * forward,
        "reduction": reduce_bytes / (cluster.network_gbytes * 1e9),
        "step": _newton_schulz_flops(stage, config) / (cluster.gpu_tflops * 1e12)
        + elementwise
        + gather_bytes / (cluster.network_gbytes * 1e9),
    }


def _ranks_of(stages: list[dict[str, Any]], schedule: PipelineSchedule) -> list[dict[str, Any]]:
    """Per pipeline rank the sums over its stages: bytes, of which only one stage at a time needs its workspace.

    Its stages' updates are made one after another, in the slack of the stage that has least.
    """
    ranks = []
    for rank in range(schedule.num_ranks):
        mine = [stages[index] for index in schedule.stages_of(rank)]
        spare = sum(stage_line["bytes"]["workspace"] for stage_line in mine) - max(
            stage_line["bytes"]["workspace"] for stage_line in mine
        )
        line = {"rank": mine[0]["rank"], "stages": list(schedule.stages_of(rank))}
        line["total_bytes"] = sum(stage_line["total_bytes"] for stage_line in mine) - spare
        if mine[0]["seconds"]:
            line["slack_seconds"] = min(stage_line["seconds"]["slack"] for stage_line in mine)
            line["update_seconds"] = sum(
                stage_line["seconds"]["reduction"] + stage_line["seconds"]["step"] for stage_line in mine
            )
        ranks.append(line)
    return ranks


def _warnings(config: Config, ranks: list[dict[str, Any]], *, is_asynchronous: bool) -> list[str]:
    """What will not fit or not hide."""
    found, limit = [], config.cluster.gpu_memory_gib if _has_gpus(config) else None
    for line in ranks:
        name = f"rank {line['rank']} (stage {', '.join(map(str, line['stages']))})"
        if limit is not None and line["total_bytes"] > limit * _GIB:
            found.append(
                f"{name} needs {size_text(line['total_bytes'])}, more than cluster.gpu_memory_gib={limit:g}; raise "
                "parallel.pipeline, parallel.expert or parallel.tensor, or lower train.micro_batch_size"
            )
        elif limit is not None and line["total_bytes"] > (1 - _RESERVE) * limit * _GIB:
            found.append(
                f"{name} needs {size_text(line['total_bytes'])} of cluster.gpu_memory_gib={limit:g}, which leaves less "
                f"than {_RESERVE:.0%} for what is not counted here: CUDA's context, communicators, workspaces, "
                "fragments, experts with more than their share; set train.recompute=selective, or lower "
                "train.micro_batch_size"
            )
        if is_asynchronous and line.get("update_seconds", 0.0) > line.get("slack_seconds", 0.0):
            found.append(
                f"{name}: reduction and step take about {line['update_seconds']:.3g} s, more than the slack of "
                f"{line['slack_seconds']:.3g} s, so the pipeline will wait; raise train.global_batch_size"
            )
    return found


def _stage_line(
    config: Config,
    stage: _Stage,
    needs: StageBuffers,
    metrics: ScheduleMetrics,
    index: int,
    activations: ActivationSizes,
) -> dict[str, Any]:
    """What the plan says of one stage, of the rank that holds most."""
    sizes = _bytes_of(stage, needs, index, activations)
    return {
        "layers": [stage.sizes.layers.start, stage.sizes.layers.stop],
        "parameters": sum(map(math.prod, stage.sizes.shapes.values())),
        "parameters_per_rank": max(
            sum(len(range(*layout.place_of(name).indices(layout.size))) for name in layout.names)
            for layout in stage.layouts
        ),
        "weight_versions": needs.versions[index],
        "microbatches_in_flight": needs.activations[index],
        "bytes": sizes,
        "total_bytes": sum(sizes.values()),
        "slack_before_norm": metrics.slack_before_norm[index],
        "slack": metrics.slack[index],
        "seconds": _estimates(config, stage, metrics, index, activations),
    }


def make_plan(config: Config) -> dict[str, Any]:
    """Compute what plan.json holds.

    Returns:
        Parameters; per stage its rank, layers, parameters and bytes by kind of the rank that holds most; bubble and
        slack of the schedule in units of one forward, with a backward of two; the rule and decay of each kind of
        parameter; tokens, operations and communication per step; warnings.
    """
    model, phases, dims = config.model, phases_of(config), config.parallel_dims
    schedule, needs = main_schedule(phases), buffers_required(phases)
    activations = activation_sizes(config)
    metrics = schedule_metrics(schedule)
    stages, lines, total, active = [], [], 0, 0
    routing: dict[tuple[str, str, float], list[int]] = {}
    counted: set[str] = set()
    for index in range(schedule.num_stages):
        stage = _make_stage(config, schedule, index, activations)
        stages.append(stage)
        shapes = stage.sizes.shapes
        new = {name: shape for name, shape in shapes.items() if name not in counted}  # a tied embedding is one
        counted |= new.keys()
        count, used = count_parameters(new, model)
        total, active = total + count, active + used
        for name, shape in new.items():
            route = stage.sizes.routes[name]
            sums = routing.setdefault((type(route.rule).__name__, route.role.value, route.weight_decay), [0, 0])
            sums[0] += 1
            sums[1] += math.prod(shape)
        line = _stage_line(config, stage, needs, metrics, index, activations)
        lines.append({"stage": index, "rank": schedule.rank_of_stage[index] * dims.size(REPLICAS), **line})
    ranks = _ranks_of(lines, schedule)
    volumes = step_volumes(
        config,
        schedule,
        [stage.sizes.layers for stage in stages],
        [stage.layouts for stage in stages],
        compute=activations.compute,
        exact=activations.exact,
    )
    return {
        "total_parameters": total,
        "active_parameters": active,
        "world_size": config.world_size,
        "layout": {axis: getattr(dims, axis) for axis in reversed(AXES)},
        "sequence_parallel": config.parallel.sequence_parallel,
        "schedule": schedule.name,
        "phases": [
            {"schedule": phase.schedule.name, "first_step": phase.first_step + 1, "last_step": phase.end_step}
            for phase in phases
        ],
        "clip": schedule.clip,
        "correction": config.correction.name,
        "delays": list(schedule.delay),
        "num_microbatches": schedule.num_microbatches,
        "tokens_per_step": config.train.global_batch_size * model.seq_length,
        "tokens": config.train.steps * config.train.global_batch_size * model.seq_length,
        "flops_per_token": flops_per_token(model),
        "bubble": metrics.bubble,
        "hops": hop_advice(config),
        "stages": lines,
        "bytes_over_1f1b": _over_1f1b(config, stages, needs, activations) if schedule.is_asynchronous else [],
        "routing": [
            {"rule": rule, "role": role, "weight_decay": decay, "tensors": tensors, "parameters": parameters}
            for (rule, role, decay), (tensors, parameters) in routing.items()
        ],
        "communication_bytes_per_step": volumes,
        "ranks": ranks,
        "warnings": _warnings(config, ranks, is_asynchronous=schedule.is_asynchronous),
    }
