"""One stage's step: scale and clip the gradient, move the master weights, publish the next compute weights.

Error feedback needs no stored update (docs/method.md): z_{t+1} = z_t - u_t(g_t) is the master, and the published
weights are x = z_{t+1} - d u_t, with u_t = lr (direction + weight_decay z_t) and the delay d: 1 is the paper's rule,
more is its prediction over several missing updates.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megaasync.config.schema import ConfigError
from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.optim.delay_compensation import DelayCompensation
from megaasync.optim.flat_param_layout import CACHED_SCRATCH, SCRATCH, FlatParamLayout, ParamGroup, iter_chunks
from megaasync.optim.matrix_owners import gather_to_owner, scatter_from_owner
from megaasync.update_rules.torch_optimizer import TorchOptimizer
from megaasync.update_rules.update_rule import State


class StageOptimizer:
    """Master weights z and rule states of one rank's shards of a stage.

    Attributes:
        layout: where each parameter lies.
        master: [layout.shard_size] z, in at least float32.
        states, memories: of the rules and of the compensation, one dict per run of the layout.
        num_updates: gradients absorbed or skipped, which is the newest version.
        num_skipped: of those, skipped; rules count the others.
    """

    def __init__(
        self,
        layout: FlatParamLayout,
        initial: list[Tensor],
        *,
        dtype: torch.dtype,
        learning_rate: Callable[[int], float],
        tensor: RankGroup = ALONE,
        compensation: DelayCompensation | None = None,
    ) -> None:
        """An optimizer.

        Args:
            layout: of the stage's parameters.
            initial: the parameters, as this rank holds them.
            dtype: of master weights and states.
            learning_rate: by the update's number.
            tensor: ranks over which matrices are split, for the exchange of their parts.
            compensation: of the gradient's delay.
        """
        self.layout, self._tensor, self._compensation = layout, tensor, compensation
        device = initial[0].device if initial else torch.device("cpu")
        self._scratch = CACHED_SCRATCH if device.type == "cpu" else SCRATCH
        flat = torch.zeros(layout.size, dtype=dtype, device=device)
        for view, parameter in zip(layout.views(flat), initial, strict=True):
            view.copy_(parameter)
        self.master = torch.zeros(layout.shard_size, dtype=dtype, device=device)
        layout.gather_shard(self.master, flat)
        del flat
        if any(run.owners and isinstance(run.rule, TorchOptimizer) and run.rule.sees_weights for run in layout.groups):
            raise ConfigError(
                "optimizer.name=torch: the step of this class depends on the weights, which are not brought together "
                "for it; set parallel.tensor=1 or take another class"
            )
        self.states = [run.rule.init(self.master.new_empty(run.state_shape)) for run in layout.groups]
        self.memories = [
            compensation.init(run.view_shard(self.master)) if compensation else {} for run in layout.groups
        ]
        self._learning_rate = learning_rate
        self.num_updates = self.num_skipped = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of all rule states on this rank."""
        return sum(tensor.nbytes for state in (*self.states, *self.memories) for tensor in state.values())

    @torch.no_grad()
    def step(
        self,
        gradient: Tensor,
        *,
        scale: Tensor | float,
        out: Tensor,
        lookahead_steps: int,
        current_weights: Tensor | None = None,
        stale_weights: Tensor | None = None,
    ) -> None:
        """Absorb one gradient and write this rank's shards of the next version of the compute weights.

        Args:
            gradient: [layout.size] sum over the batch, valid in this rank's shards; scaled in place there.
            scale: makes it the clipped mean.
            out: [layout.size] in the compute dtype; receives x in this rank's shards.
            lookahead_steps: updates that x looks ahead of z: 0 without a correction, the delay under error feedback.
            current_weights: [layout.size] the newest weights, for the compensation if there is one.
            stale_weights: [layout.size] those that the gradient was taken at; they may lie where `out` does.
        """
        lr = self._learning_rate(self.num_updates)
        self.num_updates += 1
        for run, state, memory in zip(self.layout.groups, self.states, self.memories, strict=True):
            grad = run.view(gradient).mul_(scale)
            if self._compensation is not None:
                self._compensate(grad, memory, now=run.view(current_weights), then=run.view(stale_weights))
            z, x = run.view_shard(self.master), run.view(out)
            if run.owners is not None:
                self._move(
                    run, z, x, self._direction_on_owner(run, grad, state), lr=lr, lookahead_steps=lookahead_steps
                )
                continue
            for part in iter_chunks(grad.shape, self._scratch):
                direction = self._direction(run, grad[part], state, part, weights=z[part], lr=lr)
                self._move(run, z[part], x[part], direction, lr=lr, lookahead_steps=lookahead_steps)

    @torch.no_grad()
    def skip(self, *, out: Tensor) -> None:
        """Leave a gradient out: the next version is z, as an update of zero would have it."""
        self.num_updates += 1
        self.num_skipped += 1
        for run in self.layout.groups:
            run.view(out).copy_(run.view_shard(self.master))

    def _compensate(self, grad: Tensor, memory: State, *, now: Tensor, then: Tensor) -> None:
        for part in iter_chunks(grad.shape, self._scratch):
            its_memory = {name: tensor[part] for name, tensor in memory.items()}
            self._compensation.apply_(grad[part], its_memory, now=now[part], then=then[part])

    def _direction(
        self,
        run: ParamGroup,
        grad: Tensor,
        state: State,
        part: slice,
        *,
        weights: Tensor | None = None,
        lr: float = 0.0,
    ) -> Tensor:
        its_state = {name: tensor[part] for name, tensor in state.items()}
        count = self.num_updates - self.num_skipped
        if isinstance(run.rule, TorchOptimizer) and run.rule.sees_weights:
            if lr == 0:
                return torch.zeros_like(grad)
            return run.rule.direction(grad, its_state, count=count, weights=weights, lr=lr)
        return run.rule.direction(grad, its_state, count=count)

    def _direction_on_owner(self, run: ParamGroup, grad: Tensor, state: State) -> Tensor:
        """Directions of parts of matrices, each computed for the whole matrix on one rank."""
        whole = gather_to_owner(grad, run.owners, self._tensor)
        for part in iter_chunks(whole.shape, self._scratch):
            whole[part] = self._direction(run, whole[part], state, part)
        return scatter_from_owner(whole, run.owners, self._tensor)

    @staticmethod
    def _move(run: ParamGroup, z: Tensor, x: Tensor, update: Tensor, *, lr: float, lookahead_steps: int) -> None:
        """Make a direction the update, subtract it from z, and write x."""
        if run.weight_decay:
            update.add_(z, alpha=run.weight_decay)
        update.mul_(lr)
        z.sub_(update)
        x.copy_(torch.sub(z, update, alpha=lookahead_steps, out=update) if lookahead_steps else z)
