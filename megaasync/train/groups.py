"""The process groups of one rank: one for each use along each axis."""

from dataclasses import dataclass

import torch
from torch import distributed as dist

from megaasync.config.parallel_dims import AXES
from megaasync.distributed.mesh import Mesh
from megaasync.distributed.rank_group import RankGroup
from megaasync.models.parameters import REDUCTIONS
from megaasync.pipeline.channels import group_names
from megaasync.plan.sizes import REPLICAS
from megaasync.schedules import PipelineSchedule


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one rank, one for each use: what runs in the background must not share one with what does not."""

    all: RankGroup
    norm: RankGroup
    embedding: RankGroup | None
    tensor: RankGroup
    expert: RankGroup
    tensor_updates: RankGroup
    updates: dict[tuple[str, ...], RankGroup]
    messages: dict[str, dist.ProcessGroup | None]


def make_groups(mesh: Mesh, schedule: PipelineSchedule) -> Groups:
    """All ranks make the same kinds of groups in the same order."""
    messages = {name: mesh.new_group("pipeline").handle for name in group_names(schedule.rank_of_stage)}
    reductions = dict.fromkeys(mesh.dims.effective(axes) for axes in (*REDUCTIONS, REPLICAS))
    return Groups(
        all=mesh.new_group(*AXES),
        norm=mesh.new_group(*AXES),
        embedding=mesh.new_group_of_ends() if schedule.is_tied else None,
        tensor=mesh.axis_group("tensor"),
        expert=mesh.axis_group("expert"),
        tensor_updates=mesh.new_group("tensor"),
        updates={axes: mesh.new_group(*axes) for axes in reductions},
        messages=messages,
    )


def connect_groups(groups: Groups, *, device: torch.device) -> None:
    """One small collective in each group, all ranks in one order.

    The first one in a group makes its connections, for which NCCL blocks the host: two threads that did so in two
    groups could wait for each other.
    """
    embedding = [] if groups.embedding is None else [groups.embedding]
    for group in (
        groups.all,
        groups.norm,
        *embedding,
        groups.tensor,
        groups.expert,
        groups.tensor_updates,
        *groups.updates.values(),
    ):
        group.all_reduce(torch.zeros(1, device=device))
