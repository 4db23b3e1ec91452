"""The half of a stage that the step runner drives, under overlap on its background thread: from gradient to weights.

It meets the other half, `stage_compute`, only in the weight versions (by version) and in the gradient sums and expert
loads (by step).
"""

import torch
from torch import Tensor

from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.optim.flat_param_layout import Bucket
from megaasync.optim.sharded_reducer import ShardedReducer
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.shared_parts import SharedParts, StagePlace


class StageUpdate:
    """Reduction, optimizer step and publication of one stage's weights.

    Attributes:
        place: in the model.
        versions: weights, written into slots that no forward or backward in flight uses.
        gradients: sums by step, reduced in place.
        optimizer: of its parameters.
        balance: loads of its experts, if it has any.
    """

    def __init__(
        self,
        place: StagePlace,
        shared: SharedParts,
        optimizer: StageOptimizer,
        *,
        data_parallel: ShardedReducer | None = None,
        replicas: RankGroup = ALONE,
        tied: Bucket | None = None,
    ) -> None:
        """The updating half.

        Args:
            place: in the model.
            shared: what it has in common with the other half.
            optimizer: of its parameters.
            data_parallel: sums gradients and gathers weights; None for a single rank.
            replicas: all ranks that run this stage.
            tied: the bucket of the embedding, on the first and the last stage, if the two are one.
        """
        self.place, self.optimizer = place, optimizer
        self.versions, self.gradients, self.balance = shared.versions, shared.gradients, shared.balance
        self._data_parallel = data_parallel or ShardedReducer(optimizer.layout)
        self._replicas, self._tied = replicas, tied
        self._kept: Tensor | None = None

    @property
    def num_updates(self) -> int:
        """STEPs made, which is the newest weight version."""
        return self.optimizer.num_updates

    @property
    def master(self) -> Tensor:
        """[layout.shard_size] z, this rank's shards."""
        return self.optimizer.master

    def reduce(self, step: int) -> None:
        """Sum the gradient of `step`, and its experts' loads, over the ranks that run this stage."""
        self._data_parallel.reduce(self.gradients.sum_of(step))
        if self.balance is not None:
            self._replicas.all_reduce(self.balance.sums(step))

    def sum_over_replicas(self, terms: Tensor) -> None:
        """Sum over the ranks that run this stage, in place."""
        self._replicas.all_reduce(terms)

    def tied_gradient(self, step: int) -> Tensor:
        """This rank's shard of the embedding's gradient sum, on a stage that shares it; written in place."""
        return self.gradients.sum_of(step)[self._tied.local_shard]

    def routing_stats(self, step: int) -> Tensor | None:
        """[5] float64 as `ExpertBalance.stats`, on one rank of those that run this stage; None elsewhere."""
        if self.balance is None or self._replicas.index > 0:
            return None
        return self.balance.stats(step)

    def squares(self, step: int) -> Tensor:
        """Scalar float64: this rank's part of the squares of the reduced gradient.

        A tied embedding counts on the first stage only.
        """
        is_second = self._tied is not None and self.place.is_last and not self.place.is_first
        return self._data_parallel.squares(self.gradients.sum_of(step), without=self._tied if is_second else None)

    def step(self, step: int, *, scale: float, lookahead_steps: int, grad_version: int | None = None) -> None:
        """Absorb the gradient of `step`: moves the master weights and writes weight version step + 1.

        Args:
            step: 0-based.
            scale: makes the gradient sum the clipped mean.
            lookahead_steps: see `StageOptimizer.step`.
            grad_version: weight version that the gradient was taken at, if its delay is compensated.
        """
        self._check_order(step)
        weights = self.versions.flat(step + 1)
        self.optimizer.step(
            self.gradients.sum_of(step),
            scale=scale,
            out=weights,
            lookahead_steps=lookahead_steps,
            current_weights=self.versions.flat(step),
            stale_weights=None if grad_version is None else self.versions.flat(grad_version),
        )
        self._data_parallel.gather(weights)
        if self.balance is not None:
            self.balance.absorb(step, version=step + 1)

    def skip(self, step: int) -> None:
        """Leave the gradient of `step` out; weight version step + 1 is z."""
        self._check_order(step)
        weights = self.versions.flat(step + 1)
        self.optimizer.skip(out=weights)
        self._data_parallel.gather(weights)
        if self.balance is not None:
            self.balance.skip(step, version=step + 1)

    def _check_order(self, step: int) -> None:
        assert step == self.num_updates, f"stage {self.place.index}: update {step} after {self.num_updates} updates"

    def load_master_into_slot(self, version: int, *, keeps: bool = False) -> None:
        """Write z, and the newest of what else belongs to a version, to the slot of a version not in use.

        With `keeps`, `restore_slot` undoes it for the weights.
        """
        weights = self.versions.flat(version)
        self._kept = weights.clone() if keeps else None
        self.optimizer.layout.scatter_shard(self.master, weights)
        self._data_parallel.gather(weights)
        if self.balance is not None:
            self.balance.write_version(version)

    def restore_slot(self, version: int) -> None:
        """Write back what the slot held before `load_master_into_slot`, if that kept it."""
        if self._kept is not None:
            self.versions.flat(version).copy_(self._kept)
        self._kept = None

    def gather_version(self, version: int) -> None:
        """Make the slot of a version whole from all ranks' shards, after a load."""
        self._data_parallel.gather(self.versions.flat(version))

    def whole_master(self) -> Tensor:
        """[layout.size] z of all local parameters; all ranks that run this stage call it together."""
        flat = self.master.new_zeros(self.optimizer.layout.size)
        self.optimizer.layout.scatter_shard(self.master, flat)
        self._data_parallel.gather(flat)
        return flat

    def has_finite_master(self) -> Tensor:
        """Scalar bool: this rank's shards of z hold numbers only."""
        return torch.isfinite(self.master).all()
