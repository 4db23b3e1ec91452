"""The plan: what a layout needs and how its pipeline will run, from shapes alone; no weights are made."""

import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from megaasync.config.pipeline import phases_of
from megaasync.config.schema import ModelConfig, TrainConfig
from megaasync.distributed.sharding import Shape
from megaasync.models.partition import deal_layers
from megaasync.models.transformer import stage_shapes
from megaasync.nn.precision import at_least_float32
from megaasync.optim.routing import route_parameters
from megaasync.schedules import (
    SCHEDULES,
    Costs,
    Phase,
    PipelineSchedule,
    ScheduleError,
    build_schedule,
    holdings,
    report,
)

_HOP = 0.3  # of a forward
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """What each stage must hold, over all phases of a run: weight versions, gradient sums, microbatches in flight."""

    versions: tuple[int, ...]
    gradient_buffers: tuple[int, ...]
    activations: tuple[int, ...]


def needs_of(phases: tuple[Phase, ...]) -> StageNeeds:
    """The most that any phase needs."""
    figures = [holdings(phase.schedule) for phase in phases]

    def most(name: str) -> tuple[int, ...]:
        return tuple(max(column) for column in zip(*(getattr(one, name) for one in figures), strict=True))

    return StageNeeds(most("versions"), most("gradient_buffers"), most("activations"))


def main_schedule(phases: tuple[Phase, ...]) -> PipelineSchedule:
    """The schedule that the config names, as against those of synchronous phases around it."""
    return max((phase.schedule for phase in phases), key=lambda schedule: schedule.is_asynchronous)


def hop_advice(config: TrainConfig) -> list[dict[str, float]]:
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
                chunks=parallel.virtual_stages,
                extra_in_flight=extra,
            )
            figures = report(table, costs=Costs(hop=_HOP))
            line = {"extra_in_flight": extra, "hop": _HOP, "bubble": figures.bubble}
            advice.append(line | {"most_in_flight": max(figures.activations)})
    return advice


def layers_of_stages(config: TrainConfig) -> tuple[range, ...]:
    """Layers of each stage, as the config deals them."""
    num_stages = phases_of(config)[0].schedule.num_stages
    return deal_layers(config.model, num_stages=num_stages, layers_per_stage=config.parallel.layers_per_stage)


def count_parameters(shapes: Mapping[str, Shape], model: ModelConfig) -> tuple[int, int]:
    """(all, active per token): of the routed experts a token uses top_k."""
    total = active = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        total += count
        is_expert = ".experts." in name
        active += count * model.moe.top_k // model.moe.num_experts if is_expert else count
    return total, active


def make_plan(config: TrainConfig) -> dict[str, Any]:
    """What plan.json holds.

    Returns:
        Parameters; per stage its rank, layers, parameters and bytes by kind; bubble and slack of the schedule in
        units of one forward, with a backward of two; the rule and decay of each kind of parameter; tokens and
        communication per step.
    """
    model, phases = config.model, phases_of(config)
    schedule, needs = main_schedule(phases), needs_of(phases)
    dtype = DTYPES[config.train.dtype]
    compute, main = dtype.itemsize, at_least_float32(dtype).itemsize
    figures = report(schedule)
    message = config.train.micro_batch_size * model.seq_length * model.hidden_size * compute
    stages, total, active = [], 0, 0
    routing: dict[tuple[str, str, float], list[int]] = {}
    for index, layers in enumerate(layers_of_stages(config)):
        shapes = stage_shapes(model, layers)
        count, used = count_parameters(shapes, model)
        total, active = total + count, active + used
        routes = route_parameters(shapes, config.optimizer)
        for name, route in routes.items():
            line = routing.setdefault((type(route.rule).__name__, route.role.value, route.weight_decay), [0, 0])
            line[0] += 1
            line[1] += math.prod(shapes[name])
        state_tensors = {"Sgd": 0, "AdamW": 2, "Muon": 1}
        state = sum(math.prod(shapes[n]) * state_tensors[type(r.rule).__name__] for n, r in routes.items())
        stages.append(
            {
                "stage": index,
                "rank": schedule.rank_of_stage[index],
                "layers": [layers.start, layers.stop],
                "parameters": count,
                "weight_versions": needs.versions[index],
                "microbatches_in_flight": needs.activations[index],
                "bytes": {
                    "weights": count * compute * needs.versions[index],
                    "gradients": count * main * needs.gradient_buffers[index],
                    "master": count * main,
                    "optimizer_state": state * main,
                },
                "slack_before_norm": figures.slack_before_norm[index],
                "slack": figures.slack[index],
            }
        )
    owners = schedule.rank_of_stage
    crossings = 2 * sum(one != other for one, other in itertools.pairwise(owners))
    return {
        "total_parameters": total,
        "active_parameters": active,
        "world_size": config.world_size,
        "layout": {"tensor": 1, "expert": 1, "data": 1, "pipeline": config.parallel.pipeline},
        "schedule": schedule.name,
        "phases": [
            {"schedule": phase.schedule.name, "first_step": phase.first_step + 1, "last_step": phase.end_step}
            for phase in phases
        ],
        "clip": schedule.clip,
        "correction": config.correction.name,
        "num_microbatches": schedule.num_microbatches,
        "tokens_per_step": config.train.global_batch_size * model.seq_length,
        "bubble": figures.bubble,
        "hops": hop_advice(config),
        "stages": stages,
        "routing": [
            {"rule": rule, "role": role, "weight_decay": decay, "tensors": tensors, "parameters": parameters}
            for (rule, role, decay), (tensors, parameters) in routing.items()
        ],
        "communication_bytes_per_step": crossings * schedule.num_microbatches * message,
    }


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def render_plan(plan: Mapping[str, Any]) -> str:
    """The plan for people."""
    lines = [
        f"parameters {plan['total_parameters']:,} (active per token {plan['active_parameters']:,})",
        f"layout     {plan['layout']['pipeline']} pipeline stage(s), {plan['world_size']} rank(s)",
        f"schedule   {plan['schedule']}, correction {plan['correction']}, {plan['num_microbatches']} microbatches per "
        f"step, {plan['tokens_per_step']:,} tokens per step",
        *(
            f"phase      steps {phase['first_step']} to {phase['last_step']}: {phase['schedule']}"
            for phase in plan["phases"]
            if len(plan["phases"]) > 1
        ),
        *(["clipping   each stage by its own gradient norm"] if plan["clip"] == "stage" else []),
        f"bubble     {plan['bubble']:.1%} planned (forward 1, backward 2, no hop or step cost)",
    ]
    lines += [
        f"hops       at {line['hop']:g} forwards each: bubble {max(line['bubble'], 0):.1%} with "
        f"schedule.extra_in_flight={line['extra_in_flight']} (at most {line['most_in_flight']} microbatches in flight)"
        for line in plan["hops"]
    ]
    for stage in plan["stages"]:
        kinds = ", ".join(f"{kind.replace('_', ' ')} {_size(count)}" for kind, count in stage["bytes"].items())
        first, end = stage["layers"]
        lines.append(
            f"stage {stage['stage']}    rank {stage['rank']}, layers {first} to {end - 1}, "
            f"{stage['parameters']:,} parameters: {kinds}; {stage['weight_versions']} weight version(s), "
            f"{stage['microbatches_in_flight']} microbatch(es) in flight, slack {stage['slack']:.3g} forwards"
        )
    for line in plan["routing"]:
        lines.append(
            f"updates    {line['rule']} with weight decay {line['weight_decay']:g}: {line['role']}, "
            f"{line['tensors']} tensor(s), {line['parameters']:,} parameters"
        )
    lines.append(f"transfer   {_size(plan['communication_bytes_per_step'])} per step between stages")
    return "\n".join(lines)
