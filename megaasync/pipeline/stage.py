"""One stage of the model on one rank: forward, backward, hand in the norm, step."""

import torch
from torch import Tensor, nn

from megaasync.data.microbatches import Microbatch
from megaasync.optim.flat_layout import ALIGNMENT, FlatLayout
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.gradients import GradientBuffers
from megaasync.pipeline.weight_versions import WeightVersions

Key = tuple[int, int]  # (step, microbatch)


class PipelineStage:
    """A module from tensor to tensor, its weight versions, gradient sums and optimizer.

    The module's call is `module(x, microbatch)`: x is None on the first stage, and the last stage returns the scalar
    sum of losses.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: FlatLayout,
        optimizer: StageOptimizer,
        *,
        index: int,
        num_stages: int,
        num_versions: int,
        num_gradient_buffers: int,
    ) -> None:
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.versions = WeightVersions(module, layout, num_slots=num_versions)
        self.gradients = GradientBuffers(
            self.versions.modules, layout, num_buffers=num_gradient_buffers, dtype=optimizer.master.dtype
        )
        self.optimizer = optimizer
        self._in_flight: dict[Key, tuple[Tensor | None, Tensor, int]] = {}
        self._loss: dict[int, Tensor] = {}
        self._tokens: dict[int, Tensor] = {}

    def forward(self, key: Key, x: Tensor | None, microbatch: Microbatch | None, *, version: int) -> Tensor | None:
        """Run a microbatch forward and keep what its backward needs; only the first and last stage get tokens.

        Returns:
            The activation for the next stage; None on the last one, which keeps the loss instead.
        """
        if x is not None:
            x.requires_grad_(True)
        y = self.versions.module(version)(x, microbatch)
        self._in_flight[key] = (x, y, version)
        if not self.is_last:
            return y.detach()
        step = key[0]
        self._loss[step] = self._loss.get(step, 0) + y.detach().double()
        self._tokens[step] = self._tokens.get(step, 0) + microbatch.mask_BS.sum()
        return None

    def backward(self, key: Key, grad: Tensor | None, *, version: int) -> Tensor | None:
        """Run a microbatch backward; weight gradients add to the sum of its step.

        Returns:
            The gradient for the stage before; None on the first one.
        """
        x, y, forward_version = self._in_flight.pop(key)
        assert version == forward_version, f"{key}: forward ran on version {forward_version}, backward on {version}"
        self.gradients.attach(self.versions.module(version), key[0])
        torch.autograd.backward(y, grad)
        return None if x is None else x.grad

    def norm_terms(self, step: int) -> Tensor:
        """[3] float64: squares of the gradient sum, loss sum and valid tokens (the last two on the last stage only)."""
        gradient = self.gradients.sum_of(step)
        terms = gradient.new_zeros(3, dtype=torch.float64)
        # One float32 sum over all elements is off by 4e-4 at 10 million; rows of 64 summed in float64 are exact enough.
        rows = torch.linalg.vector_norm(gradient.view(-1, ALIGNMENT), dim=1)
        terms[0] = torch.linalg.vector_norm(rows.double()).square()
        if self.is_last:
            terms[1], terms[2] = self._loss.pop(step), self._tokens.pop(step)
        return terms

    def step(self, step: int, *, scale: float) -> None:
        """Absorb the gradient of `step`: moves the master weights and writes weight version step + 1."""
        self.optimizer.step(self.gradients.sum_of(step), scale=scale, publish=self.versions.flat(step + 1))

    @torch.no_grad()
    def evaluate(self, x: Tensor | None, microbatch: Microbatch | None, *, version: int) -> Tensor:
        """Forward only, in evaluation mode; keeps nothing."""
        module = self.versions.module(version)
        module.eval()
        y = module(x, microbatch)
        module.train()
        return y
