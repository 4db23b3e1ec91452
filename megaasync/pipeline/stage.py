"""One stage of the model on one rank: forward, backward (whole or split), hand in the gradient, step."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaasync.data.microbatches import Microbatch
from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.kernels.weight_gradients import Deferred, WeightGradientQueue, accumulate, use_queue
from megaasync.optim.data_parallel import DataParallel
from megaasync.optim.expert_balance import ExpertBalance
from megaasync.optim.flat_layout import FlatLayout
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.gradients import GradientBuffers
from megaasync.pipeline.weight_versions import WeightVersions

Key = tuple[int, int]  # (step, microbatch)


class PipelineStage:
    """A module from tensor to tensor, its weight versions, gradient sums and optimizer.

    The module's call is `module(x, microbatch)`: x is None on the first stage, and the last stage returns the scalar
    sum of losses.

    Attributes:
        needs_mask: the module wants to know which tokens are valid, or of which document, so it wants the microbatch.
        balance: loads of its experts, if it has any.
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
        data_parallel: DataParallel | None = None,
        replicas: RankGroup = ALONE,
        counts: bool = True,
        balance_rate: float = 0.0,
        needs_documents: bool = False,
    ) -> None:
        """A stage.

        Args:
            module: version 0; replicas of it hold the others.
            layout: of its parameters.
            optimizer: of its parameters.
            index, num_stages: place in the model.
            num_versions, num_gradient_buffers: from the schedule's report.
            splits_backward: the schedule has input and weight gradients apart.
            tied_parameter: name of the embedding, on the first and the last stage, if the two are one; it has a bucket
                of its own.
            data_parallel: sums gradients and gathers weights; None for a single rank.
            replicas: all ranks that run this stage.
            counts: this rank's losses and tokens are counted; tensor-parallel ranks all have the same.
            balance_rate: step of the routers' biases.
            needs_documents: tokens attend within their documents.
        """
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.versions = WeightVersions(module, layout, num_slots=num_versions)
        self.gradients = GradientBuffers(
            self.versions.modules, layout, num_buffers=num_gradient_buffers, dtype=optimizer.master.dtype
        )
        self.optimizer = optimizer
        self._tied = None if tied_parameter is None else layout.bucket_of(tied_parameter)
        self._data_parallel = data_parallel or DataParallel(layout)
        self._replicas, self._counts = replicas, counts
        routers = [[one for one in m.modules() if hasattr(one, "fractions_E")] for m in self.versions.modules]
        self.balance = ExpertBalance(routers, bias_update_rate=balance_rate) if routers[0] else None
        self.needs_mask = bool(routers[0]) or needs_documents
        self._queue = WeightGradientQueue() if splits_backward else None
        if splits_backward:
            for replica in self.versions.modules:
                use_queue(replica, self._queue)
        self._in_flight: dict[Key, tuple[Tensor | None, GradientEdge, int]] = {}
        self._deferred: dict[Key, tuple[Deferred, int]] = {}
        self._kept: Tensor | None = None
        self._loss: dict[int, list[Tensor]] = {}
        self._tokens: dict[int, Tensor] = {}

    @property
    def num_updates(self) -> int:
        """STEPs made, which is the newest weight version."""
        return self.optimizer.num_updates

    @property
    def master(self) -> Tensor:
        """[layout.owned_size] z, this rank's shares."""
        return self.optimizer.master

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
        with nullcontext() if self.balance is None else self.balance.counting(step):
            y = self.versions.module(version)(x, microbatch)
        # the edge, not the tensor: its values are not needed again here
        self._in_flight[key] = (x, get_gradient_edge(y), version)
        if microbatch is not None:
            self._tokens[step] = self._tokens.get(step, 0) + microbatch.mask_BS.sum()
        if not self.is_last:
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

    def reduce(self, step: int) -> None:
        """Sum the gradient of `step`, and its experts' loads, over the ranks that run this stage."""
        self._data_parallel.reduce(self.gradients.sum_of(step))
        if self.balance is not None:
            self._replicas.all_reduce(self.balance.sums(step))

    def sum_over_replicas(self, terms: Tensor) -> None:
        """Sum over the ranks that run this stage, in place."""
        self._replicas.all_reduce(terms)

    def tied_gradient(self, step: int) -> Tensor:
        """This rank's share of the embedding's gradient sum, on a stage that shares it; written in place."""
        return self.gradients.sum_of(step)[self._tied.owned]

    def take_sums(self, step: int) -> Tensor:
        """[2 + m] float64: loss sum of `step`, valid tokens that this stage was given, and losses by microbatch.

        Losses are there on the last stage only, in the order of its forwards, which is that of the microbatches.
        """
        losses, tokens = self._loss.pop(step, []), self._tokens.pop(step, 0)
        sums = self.master.new_zeros(2 + len(losses), dtype=torch.float64)
        if self._counts:
            sums[1] = tokens
            if losses:
                torch.stack(losses, out=sums[2:])
                sums[0] = sums[2:].sum()
        return sums

    def routing_figures(self, step: int) -> Tensor | None:
        """As `ExpertBalance.figures`, on one rank of those that run this stage; None elsewhere."""
        if self.balance is None or self._replicas.index > 0:
            return None
        return self.balance.figures(step)

    def squares(self, step: int) -> Tensor:
        """Scalar float64: this rank's part of the squares of the reduced gradient.

        A tied embedding counts on the first stage only.
        """
        is_second = self._tied is not None and self.is_last and not self.is_first
        return self._data_parallel.squares(self.gradients.sum_of(step), without=self._tied if is_second else None)

    def step(self, step: int, *, scale: float, ahead: int, taken_at: int | None = None) -> None:
        """Absorb the gradient of `step`: moves the master weights and writes weight version step + 1.

        Args:
            step: 0-based.
            scale: makes the gradient sum the clipped mean.
            ahead: see `StageOptimizer.step`.
            taken_at: weight version that the gradient was taken at, if its delay is compensated.
        """
        assert step == self.num_updates, f"stage {self.index}: update {step} after {self.num_updates} updates"
        weights = self.versions.flat(step + 1)
        self.optimizer.step(
            self.gradients.sum_of(step),
            scale=scale,
            publish=weights,
            ahead=ahead,
            now=self.versions.flat(step),
            then=None if taken_at is None else self.versions.flat(taken_at),
        )
        self._data_parallel.gather(weights)
        if self.balance is not None:
            self.balance.absorb(step, version=step + 1)

    def skip(self, step: int) -> None:
        """Leave the gradient of `step` out; weight version step + 1 is z."""
        assert step == self.num_updates, f"stage {self.index}: update {step} after {self.num_updates} updates"
        weights = self.versions.flat(step + 1)
        self.optimizer.skip(publish=weights)
        self._data_parallel.gather(weights)
        if self.balance is not None:
            self.balance.leave_out(step, version=step + 1)

    def publish_master(self, version: int, *, keeps: bool = False) -> None:
        """Write z, and the newest of what else belongs to a version, to the slot of a version not in use.

        With `keeps`, `put_back` undoes it for the weights.
        """
        weights = self.versions.flat(version)
        self._kept = weights.clone() if keeps else None
        self.optimizer.layout.spread_owned(self.master, weights)
        self._data_parallel.gather(weights)
        if self.balance is not None:
            self.balance.publish(version)

    def gather_version(self, version: int) -> None:
        """Make the slot of a version whole from all ranks' shares, after a load."""
        self._data_parallel.gather(self.versions.flat(version))

    def put_back(self, version: int) -> None:
        """What the slot held before `publish_master`, if that kept it."""
        if self._kept is not None:
            self.versions.flat(version).copy_(self._kept)
        self._kept = None

    def whole_master(self) -> Tensor:
        """[layout.size] z of all local parameters; all ranks that run this stage call it together."""
        flat = self.master.new_zeros(self.optimizer.layout.size)
        self.optimizer.layout.spread_owned(self.master, flat)
        self._data_parallel.gather(flat)
        return flat

    @torch.no_grad()
    def evaluate(self, x: Tensor | None, microbatch: Microbatch | None, *, version: int) -> Tensor:
        """Forward only, in evaluation mode; keeps nothing."""
        module = self.versions.module(version)
        module.eval()
        y = module(x, microbatch)
        module.train()
        return y
