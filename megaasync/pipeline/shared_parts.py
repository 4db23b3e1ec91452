"""In what the two halves of a stage meet: weight versions by version, gradient sums and expert loads by step."""

from dataclasses import dataclass

import torch
from torch import nn

from megaasync.optim.expert_balance import ExpertBalance
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.pipeline.gradients import GradientBuffers
from megaasync.pipeline.weight_versions import WeightVersions


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Which stage of the model: `index` of `num_stages`, from 0."""

    index: int
    num_stages: int

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.index == self.num_stages - 1


@dataclass(frozen=True, slots=True)
class SharedParts:
    """All that the main thread and the background thread both touch of a stage.

    Attributes:
        versions: weights. A slot is written only while no forward or backward of its old version is left.
        gradients: sums. A step's sum is reduced only after its last backward.
        balance: loads of the experts, if there are any, counted and absorbed by step as gradients are.
    """

    versions: WeightVersions
    gradients: GradientBuffers
    balance: ExpertBalance | None


def make_shared_parts(
    module: nn.Module,
    layout: FlatParamLayout,
    *,
    num_versions: int,
    num_gradient_buffers: int,
    gradient_dtype: torch.dtype,
    bias_update_rate: float = 0.0,
) -> SharedParts:
    """Replicate a module for its weight versions and allocate its gradient sums.

    Args:
        module: version 0; replicas of it hold the others.
        layout: of its parameters.
        num_versions: weight versions that the schedule needs.
        num_gradient_buffers: gradient sums that it needs.
        gradient_dtype: of the sums, that of the master weights.
        bias_update_rate: step of the routers' biases.
    """
    versions = WeightVersions(module, layout, num_slots=num_versions)
    gradients = GradientBuffers(versions.modules, layout, num_buffers=num_gradient_buffers, dtype=gradient_dtype)
    routers = [[router for router in m.modules() if hasattr(router, "fractions_E")] for m in versions.modules]
    balance = ExpertBalance(routers, bias_update_rate=bias_update_rate) if routers[0] else None
    return SharedParts(versions, gradients, balance)
