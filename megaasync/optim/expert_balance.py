"""Loads of the experts of one stage by batch, and what follows from them: the routers' biases and fractions.

Both are buffers that belong to the weight version (docs/method.md): the STEP that absorbs a batch's gradient also
applies its token counts, error feedback does not extrapolate them, and evaluations count nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NUM_LOSSES = 3  # that a router has beside the cross entropy
NUM_STATS = 2 + NUM_LOSSES


class ExpertBalance:
    """Counts the loads of the experts of one stage, and moves their routers' biases.

    Attributes:
        bias_LE: [L, E] added to the scores for the choice, newest.
        fractions_LE: [L, E] share of the choices in the last batch absorbed.
    """

    def __init__(self, routers: Sequence[Sequence[Any]], *, bias_update_rate: float) -> None:
        """Observe routers.

        Args:
            routers: of each weight slot, in the order of the layers; modules with `bias_E`, `fractions_E`, `observer`
                and `layer`.
            bias_update_rate: step of the biases.
        """
        self._routers, self._rate = routers, bias_update_rate
        self.bias_LE = torch.stack([router.bias_E.clone() for router in routers[0]])
        self.fractions_LE = torch.stack([router.fractions_E.clone() for router in routers[0]])
        for replicas in routers:
            for layer, router in enumerate(replicas):
                router.observer, router.layer = self, layer
        self._by_step: dict[int, Tensor] = {}
        self._step: int | None = None

    @contextmanager
    def counting(self, step: int) -> Iterator[None]:
        """What the routers do inside belongs to a batch."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def add(self, layer: int, routing: Any) -> None:
        """Count a routing; nothing outside `counting`."""
        if self._step is None:
            return
        num_experts = self.bias_LE.shape[1]
        if self._step not in self._by_step:
            length = self.bias_LE.numel() + NUM_LOSSES
            self._by_step[self._step] = self.bias_LE.new_zeros(length, dtype=torch.float64)
        sums = self._by_step[self._step]
        sums[layer * num_experts : (layer + 1) * num_experts] += routing.counts_E
        if routing.losses_3 is not None:
            sums[-NUM_LOSSES:] += routing.losses_3.detach()

    def expect(self, step: int) -> None:
        """Make room for the counts of a batch that a checkpoint brings."""
        self._by_step[step] = self.bias_LE.new_zeros(self.bias_LE.numel() + NUM_LOSSES, dtype=torch.float64)

    def sums(self, step: int) -> Tensor:
        """[L E + 3] float64 of a batch: choices by layer and expert, losses; to be summed over ranks in place."""
        return self._by_step[step]

    def counts(self, step: int) -> Tensor:
        """[L, E] of a batch not absorbed yet, a view."""
        return self._by_step[step][:-NUM_LOSSES].view_as(self.bias_LE)

    def stats(self, step: int) -> Tensor:
        """[5] float64: over the layers, sum of the largest load over the mean load; number of layers; losses."""
        counts_LE = self.counts(step)
        largest = (counts_LE.amax(dim=1) / counts_LE.mean(dim=1).clamp_min(1e-30)).sum()
        layers = torch.full_like(largest, len(counts_LE))
        return torch.cat([torch.stack([largest, layers]), self._by_step[step][-NUM_LOSSES:]])

    def absorb(self, step: int, *, version: int) -> None:
        """Move biases against the loads of a batch, take its fractions, and write both to the slot of a version."""
        counts_LE, sums = self.counts(step), self._by_step.pop(step)
        if sums.is_cuda:  # made on the caller's stream and still to be read on this one
            sums.record_stream(torch.cuda.current_stream(sums.device))
        total_L1 = counts_LE.sum(dim=1, keepdim=True)
        if self._rate:
            below_LE = torch.sign(counts_LE.mean(dim=1, keepdim=True) - counts_LE)
            self.bias_LE.add_(below_LE.to(self.bias_LE.dtype), alpha=self._rate)
        # a batch without a valid token leaves the fractions as they are
        fractions_LE = (counts_LE / total_L1.clamp_min(1)).to(self.fractions_LE.dtype)
        torch.where(total_L1 > 0, fractions_LE, self.fractions_LE, out=self.fractions_LE)
        self.write_version(version)

    def skip(self, step: int, *, version: int) -> None:
        """Forget the counts of a batch whose gradient is skipped."""
        self._by_step.pop(step)
        self.write_version(version)

    def write_version(self, version: int) -> None:
        """Write the newest biases and fractions to the slot of a version."""
        for layer, router in enumerate(self._routers[version % len(self._routers)]):
            router.bias_E.copy_(self.bias_LE[layer])
            router.fractions_E.copy_(self.fractions_LE[layer])
