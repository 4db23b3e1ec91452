"""One stage of the model on one rank: forward, backward (whole or split), hand in the gradient, step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaasync.data.microbatches import Microbatch
from megaasync.kernels.weight_gradients import Deferred, WeightGradientQueue, accumulate, use_queue
from megaasync.optim.flat_layout import ALIGNMENT, FlatLayout
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.gradients import GradientBuffers
from megaasync.pipeline.weight_versions import WeightVersions

Key = tuple[int, int]  # (step, microbatch)


def sum_of_squares(flat: Tensor) -> Tensor:
    """Scalar float64.

    One float32 sum over all elements is off by 4e-4 at 10 million; rows of 64 summed in float64 are exact enough.
    """
    whole = len(flat) - len(flat) % ALIGNMENT
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ALIGNMENT), dim=1)
    return rows.double().square().sum() + flat[whole:].double().square().sum()


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
        splits_backward: bool = False,
        tied_parameter: str | None = None,
        reduce: Callable[[Tensor], None] | None = None,
    ) -> None:
        """A stage.

        Args:
            module: version 0; replicas of it hold the others.
            layout: of its parameters.
            optimizer: of its parameters.
            index, num_stages: place in the model.
            num_versions, num_gradient_buffers: from the schedule's report.
            splits_backward: the schedule has input and weight gradients apart.
            tied_parameter: name of the embedding, on the first and the last stage, if the two are one.
            reduce: sums a gradient over data-parallel ranks in place, if there are several.
        """
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.versions = WeightVersions(module, layout, num_slots=num_versions)
        self.gradients = GradientBuffers(
            self.versions.modules, layout, num_buffers=num_gradient_buffers, dtype=optimizer.master.dtype
        )
        self.optimizer = optimizer
        self._tied = None if tied_parameter is None else layout.place_of(tied_parameter)
        self._reduce = reduce
        self._queue = WeightGradientQueue() if splits_backward else None
        if splits_backward:
            for replica in self.versions.modules:
                use_queue(replica, self._queue)
        self._in_flight: dict[Key, tuple[Tensor | None, GradientEdge, int]] = {}
        self._deferred: dict[Key, tuple[Deferred, int]] = {}
        self._loss: dict[int, Tensor] = {}
        self._tokens: dict[int, Tensor] = {}

    @property
    def num_updates(self) -> int:
        """STEPs made, which is the newest weight version."""
        return self.optimizer.num_updates

    @property
    def master(self) -> Tensor:
        """[layout.size] z."""
        return self.optimizer.master

    def forward(self, key: Key, x: Tensor | None, microbatch: Microbatch | None, *, version: int) -> Tensor | None:
        """Run a microbatch forward and keep what its backward needs.

        The first and the last stage need the microbatch; a stage that is given it counts its tokens.

        Returns:
            The activation for the next stage; None on the last one, which keeps the loss instead.
        """
        if x is not None:
            x.requires_grad_(True)
        y = self.versions.module(version)(x, microbatch)
        # the edge, not the tensor: its values are not needed again here
        self._in_flight[key] = (x, get_gradient_edge(y), version)
        step = key[0]
        if microbatch is not None:
            self._tokens[step] = self._tokens.get(step, 0) + microbatch.mask_BS.sum()
        if not self.is_last:
            return y.detach()
        self._loss[step] = self._loss.get(step, 0) + y.detach().double()
        return None

    def _begin_backward(self, key: Key, version: int) -> tuple[Tensor | None, GradientEdge]:
        x, y, forward_version = self._in_flight.pop(key)
        assert version == forward_version, f"{key}: forward ran on version {forward_version}, backward on {version}"
        self.gradients.attach(self.versions.module(version), key[0])
        return x, y

    def backward(self, key: Key, grad: Tensor | None, *, version: int) -> Tensor | None:
        """Run a microbatch backward; weight gradients add to the sum of its step.

        Returns:
            The gradient for the stage before; None on the first one.
        """
        x, y = self._begin_backward(key, version)
        torch.autograd.backward(y, grad)
        return None if x is None else x.grad

    def backward_input(self, key: Key, grad: Tensor | None, *, version: int) -> Tensor | None:
        """The first half of a backward: as `backward`, but the linear layers' weight gradients wait."""
        x, y = self._begin_backward(key, version)
        with self._queue.collect() as deferred:
            torch.autograd.backward(y, grad)
        self._deferred[key] = (deferred, version)
        return None if x is None else x.grad

    def backward_weight(self, key: Key) -> None:
        """The second half: the weight gradients that waited."""
        deferred, version = self._deferred.pop(key)
        self.gradients.attach(self.versions.module(version), key[0])
        accumulate(deferred)

    def reduce(self, step: int) -> None:
        """Sum the gradient of `step` over data-parallel ranks, if there are several."""
        if self._reduce is not None:
            self._reduce(self.gradients.sum_of(step))

    def tied_gradient(self, step: int) -> Tensor:
        """The embedding's part of the gradient sum of `step`, on a stage that shares it; written in place."""
        return self.gradients.sum_of(step)[self._tied]

    def take_sums(self, step: int) -> Tensor:
        """[2] float64: loss sum of `step` (0 but on the last stage) and valid tokens that this stage was given."""
        sums = self.master.new_zeros(2, dtype=torch.float64)
        sums[0] = self._loss.pop(step, 0.0)
        sums[1] = self._tokens.pop(step, 0)
        return sums

    def drop_gradient(self, step: int) -> None:
        """Put zeros in the place of a gradient that is not finite."""
        self.gradients.sum_of(step).zero_()

    def squares(self, step: int) -> Tensor:
        """Scalar float64: squares of the gradient sum. A tied embedding counts on the first stage only."""
        gradient = self.gradients.sum_of(step)
        if self._tied is not None and self.is_last and not self.is_first:
            return sum_of_squares(gradient[: self._tied.start]) + sum_of_squares(gradient[self._tied.stop :])
        return sum_of_squares(gradient)

    def step(self, step: int, *, scale: float, ahead: int) -> None:
        """Absorb the gradient of `step`: moves the master weights and writes weight version step + 1.

        Args:
            step: 0-based.
            scale: makes the gradient sum the clipped mean.
            ahead: see `StageOptimizer.step`.
        """
        assert step == self.num_updates, f"stage {self.index}: update {step} after {self.num_updates} updates"
        self.optimizer.step(self.gradients.sum_of(step), scale=scale, publish=self.versions.flat(step + 1), ahead=ahead)

    @torch.no_grad()
    def evaluate(self, x: Tensor | None, microbatch: Microbatch | None, *, version: int) -> Tensor:
        """Forward only, in evaluation mode; keeps nothing."""
        module = self.versions.module(version)
        module.eval()
        y = module(x, microbatch)
        module.train()
        return y
