"""One stage's step: scale and clip the gradient, move the master weights, publish the next compute weights.

Error feedback needs no stored update (METHOD.md section 1): z_{t+1} = z_t - u_t(g_t) is the master, and the published
weights are x = z_{t+1} - d u_t, with u_t = lr (direction + weight_decay z_t) and the delay d: 1 is the paper's rule,
more is its prediction over several missing updates.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megaasync.optim.flat_layout import FlatLayout


class StageOptimizer:
    """Master weights z and rule states of one stage, all in one flat layout.

    Attributes:
        layout: where each parameter lies.
        master: [layout.size] z, in at least float32.
        num_updates: gradients absorbed.
    """

    def __init__(
        self,
        layout: FlatLayout,
        initial: list[Tensor],
        *,
        dtype: torch.dtype,
        learning_rate: Callable[[int], float],
    ) -> None:
        self.layout = layout
        self.master = torch.zeros(layout.size, dtype=dtype, device=initial[0].device)
        for view, parameter in zip(layout.views(self.master), initial, strict=True):
            view.copy_(parameter)
        self._states = [group.rule.init(group.view(self.master)) for group in layout.groups]
        self._learning_rate = learning_rate
        self.num_updates = 0

    @torch.no_grad()
    def step(self, gradient: Tensor, *, scale: Tensor | float, publish: Tensor, ahead: int) -> None:
        """Absorb one gradient and write the next version of the compute weights.

        Args:
            gradient: [layout.size] sum over the batch; scaled in place.
            scale: makes it the clipped mean.
            publish: [layout.size] in the compute dtype; receives x.
            ahead: updates that x looks ahead of z: 0 without a correction, the delay under error feedback.
        """
        lr = self._learning_rate(self.num_updates)
        self.num_updates += 1
        gradient.mul_(scale)
        for group, whole_state in zip(self.layout.groups, self._states, strict=True):
            for part in group.parts():
                z = group.view(self.master)[part]
                state = {name: tensor[part] for name, tensor in whole_state.items()}
                update = group.rule.direction(group.view(gradient)[part], state, count=self.num_updates)
                if group.weight_decay:
                    update.add_(z, alpha=group.weight_decay)
                update.mul_(lr)
                z.sub_(update)
                group.view(publish)[part].copy_(torch.sub(z, update, alpha=ahead, out=update) if ahead else z)
