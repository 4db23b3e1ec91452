"""What all ranks sum for each step, in one float64 vector with named slots, and what follows from the sum."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megaasync.optim.expert_balance import NUM_STATS

_SQUARES, _LOSS_SUM, _TOKENS, _STOPS = range(4)
_ROUTING = slice(4, 4 + NUM_STATS)  # largest loads, layers with experts, the routers' losses
_FIXED = 4 + NUM_STATS  # then a slot per stage and per microbatch that counts what is not finite


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one batch gave, the same on every rank.

    Attributes:
        step: 0-based batch number.
        loss: mean over the global batch's valid tokens, in nats.
        grad_norm: global, before clipping.
        tokens: valid tokens of the batch.
        backward_done_at: when this rank's last backward of the batch was done, seconds of `perf_counter`.
        stop: some rank asked to stop.
        expert_load: tokens of the busiest expert over the mean, mean over the layers with experts; None without any.
        routing_losses: the routers' losses, per valid token, in the order of `megaasync.nn.router.LOSSES`.
        broken_stages: those whose gradient is not finite.
        broken_microbatches: those whose loss is not finite, on any data-parallel rank; 0-based.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    backward_done_at: float
    stop: bool
    expert_load: float | None = None
    routing_losses: tuple[float, ...] = ()
    broken_stages: tuple[int, ...] = ()
    broken_microbatches: tuple[int, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def explain(self, *, clips_globally: bool, skipped_before: int | None) -> str:
        """What is not finite, where, and what to do; `skipped_before` is None where no batch may be skipped."""
        where = []
        if self.broken_microbatches:
            where.append(f"losses of microbatches {', '.join(str(n + 1) for n in self.broken_microbatches)}")
        if self.broken_stages:
            where.append(f"gradients of stages {', '.join(map(str, self.broken_stages))}")
        applied = "nothing of this step was applied" if clips_globally else "stages with such a gradient left it out"
        skipped = ""
        if skipped_before is not None:
            skipped = f"; {skipped_before} batches were skipped before, as train.max_skipped allows"
        return (
            f"step {self.step + 1}: loss {self.loss} and global gradient norm {self.grad_norm} are not both finite "
            f"({'; '.join(where)}); {applied}{skipped}. Try a lower optimizer.lr or a longer train.warmup_steps"
        )


class StepStats:
    """One rank's part of a step's statistics; the sum of all ranks' is the step's.

    Attributes:
        vector: [length] float64, to be summed over all ranks in place.
    """

    def __init__(self, *, num_stages: int, num_microbatches: int, device: torch.device) -> None:
        self._num_stages, self._num_microbatches = num_stages, num_microbatches
        length = self.length(num_stages=num_stages, num_microbatches=num_microbatches)
        self.vector = torch.zeros(length, dtype=torch.float64, device=device)

    @staticmethod
    def length(*, num_stages: int, num_microbatches: int) -> int:
        """Numbers in the vector."""
        return _FIXED + num_stages + num_microbatches

    def set_stage(self, index: int, squares: Tensor, *, sums: Tensor | None, routing: Tensor | None) -> None:
        """Fill in one stage's part.

        Args:
            index: of the stage.
            squares: scalar, this rank's part of its gradient's squares.
            sums: [2 + m] as `StageCompute.take_sums`, of the last stage; None of others.
            routing: [NUM_STATS] as `ExpertBalance.stats`; None for none.
        """
        self.vector[_SQUARES] = squares
        self.vector[_FIXED + index] = ~squares.isfinite()
        if sums is not None:
            self.vector[_LOSS_SUM : _TOKENS + 1] = sums[:2]
            first = _FIXED + self._num_stages
            self.vector[first : first + len(sums) - 2] = ~sums[2:].isfinite()
        if routing is not None:
            self.vector[_ROUTING] = routing

    @property
    def squares(self) -> Tensor:
        """Scalar float64, a view."""
        return self.vector[_SQUARES]

    def add(self, other: "StepStats") -> None:
        """Add another stage's part of the same rank."""
        self.vector += other.vector

    def set_stop(self, stop: bool) -> None:
        """Set whether this rank asks to stop."""
        self.vector[_STOPS] = float(stop)

    def result(self, step: int, *, backward_done_at: float) -> StepResult:
        """Read the summed vector: the one time that the host waits for it."""
        numbers = self.vector.tolist()
        largest, layers, *losses = numbers[_ROUTING]
        broken = numbers[_FIXED:]
        divisor = max(numbers[_TOKENS], 1.0)
        return StepResult(
            step,
            numbers[_LOSS_SUM] / divisor,
            numbers[_SQUARES] ** 0.5 / divisor,
            int(numbers[_TOKENS]),
            backward_done_at,
            numbers[_STOPS] > 0,
            largest / layers if layers else None,
            tuple(loss / divisor for loss in losses) if layers else (),
            tuple(index for index in range(self._num_stages) if broken[index]),
            tuple(number for number in range(self._num_microbatches) if broken[self._num_stages + number]),
        )
