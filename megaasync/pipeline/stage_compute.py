"""The half of a stage that the executor drives, on the main thread: forwards, backwards, evaluations.

It meets the other half, `stage_update`, only in the weight versions (by version) and in the gradient sums and expert
loads (by step).
"""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaasync.data.microbatches import Microbatch
from megaasync.kernels.weight_gradients import DeferredWgrads, WeightGradientQueue, accumulate, attach_queue
from megaasync.pipeline.shared_parts import SharedParts, StagePlace

Key = tuple[int, int]  # (step, microbatch)


class StageCompute:
    """Forward and backward of one stage, on whatever weight version the schedule names.

    A stage's module is called as `module(x, microbatch)`: x is None on the first stage, and the last stage returns the
    scalar sum of losses.

    Attributes:
        place: in the model.
        versions: weights, read only.
        gradients: sums by step, added to.
        needs_mask: the module wants to know which tokens are valid, or of which document, so it wants the microbatch.
    """

    def __init__(
        self,
        place: StagePlace,
        shared: SharedParts,
        *,
        splits_backward: bool = False,
        needs_documents: bool = False,
        reports_loss: bool = True,
    ) -> None:
        """The computing half.

        Args:
            place: in the model.
            shared: what it has in common with the other half.
            splits_backward: the schedule has input and weight gradients apart.
            needs_documents: tokens attend within their documents.
            reports_loss: this rank's losses and tokens are counted; tensor-parallel ranks all have the same.
        """
        self.place, self.versions, self.gradients = place, shared.versions, shared.gradients
        self._balance, self._reports_loss = shared.balance, reports_loss
        self.needs_mask = shared.balance is not None or needs_documents
        self._queue = WeightGradientQueue() if splits_backward else None
        if splits_backward:
            for replica in shared.versions.modules:
                attach_queue(replica, self._queue)
        self._in_flight: dict[Key, tuple[Tensor | None, GradientEdge, int]] = {}
        self._deferred: dict[Key, tuple[DeferredWgrads, int]] = {}
        self._loss: dict[int, list[Tensor]] = {}
        self._tokens: dict[int, Tensor] = {}

    def forward(self, key: Key, x: Tensor | None, microbatch: Microbatch | None, *, version: int) -> Tensor | None:
        """Run a microbatch forward and keep what its backward needs.

        The first and the last stage need the microbatch, and those that `needs_mask`; a stage that is given it counts
        its tokens.

        Returns:
            The activation for the next stage; None on the last one, which keeps the loss instead.
        """
        if x is not None:
            x.requires_grad_(True)
        step = key[0]
        with nullcontext() if self._balance is None else self._balance.counting(step):
            y = self.versions.module(version)(x, microbatch)
        # the edge, not the tensor: its values are not needed again here
        self._in_flight[key] = (x, get_gradient_edge(y), version)
        if microbatch is not None:
            self._tokens[step] = self._tokens.get(step, 0) + microbatch.mask_BS.sum()
        if not self.place.is_last:
            return y.detach()
        self._loss.setdefault(step, []).append(y.detach().double())
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

    def take_sums(self, step: int) -> Tensor:
        """[2 + m] float64: loss sum of `step`, valid tokens that this stage was given, and losses by microbatch.

        Losses are there on the last stage only, in the order of its forwards, which is that of the microbatches.
        """
        losses, tokens = self._loss.pop(step, []), self._tokens.pop(step, 0)
        sums = torch.zeros(2 + len(losses), dtype=torch.float64, device=self.versions.flat(0).device)
        if self._reports_loss:
            sums[1] = tokens
            if losses:
                torch.stack(losses, out=sums[2:])
                sums[0] = sums[2:].sum()
        return sums

    @torch.no_grad()
    def evaluate(self, x: Tensor | None, microbatch: Microbatch | None, *, version: int) -> Tensor:
        """Forward only, in evaluation mode; keeps nothing."""
        module = self.versions.module(version)
        module.eval()
        y = module(x, microbatch)
        module.train()
        return y
