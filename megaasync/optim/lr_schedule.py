"""Learning rate as a pure function of the update's number."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaasync.config.schema import TrainingConfig


@dataclass(frozen=True, slots=True)
class LrShape:
    """The shape of a learning rate over the updates; names as in the train group.

    Attributes:
        lr_horizon: steps over which cosine and wsd run: train.lr_schedule_steps, or else train.steps.
    """

    lr_schedule: str
    lr_horizon: int
    warmup_steps: int
    final_lr_ratio: float
    decay_steps: int

    @classmethod
    def of(cls, config: TrainingConfig) -> "LrShape":
        """The shape that a config's train group asks for."""
        return cls(
            config.lr_schedule,
            config.lr_schedule_steps or config.steps,
            config.warmup_steps,
            config.final_lr_ratio,
            config.decay_steps,
        )

    @classmethod
    def of_plain(cls, train: Mapping[str, Any]) -> "LrShape":
        """The shape in a train group that a checkpoint has written down; an older one has no lr_schedule_steps."""
        horizon = train.get("lr_schedule_steps") or train["steps"]
        return cls(train["lr_schedule"], horizon, train["warmup_steps"], train["final_lr_ratio"], train["decay_steps"])


def lr_multiplier(shape: LrShape, update: int) -> float:
    """Share of the peak learning rate that an update uses.

    Linear warmup reaches the peak at update `warmup_steps - 1`. Cosine begins at the peak too, at update
    `warmup_steps`, so that the peak is used twice, and falls to `final_lr_ratio` at the last update of the horizon; wsd
    stays and falls linearly over the last `decay_steps` (arXiv 2404.06395); constant stays. Beyond the horizon the
    last value stays.

    Args:
        shape: of the schedule.
        update: number of the update, from 0; the k-th applied update uses the k-th rate under any delay.
    """
    if update < shape.warmup_steps:
        return (update + 1) / shape.warmup_steps
    last, floor = shape.lr_horizon - 1, shape.final_lr_ratio
    if shape.lr_schedule == "cosine":
        length = last - shape.warmup_steps
        progress = min((update - shape.warmup_steps) / length, 1.0) if length > 0 else 1.0
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if shape.lr_schedule == "wsd":
        left = last - update
        if left < shape.decay_steps:
            return floor + (1 - floor) * max(left, 0) / shape.decay_steps
    return 1.0


class LearningRate:
    """update -> learning rate. Updates before a resume keep the rate that their rows were written with."""

    def __init__(self, shape: LrShape, *, peak: float) -> None:
        self._shape, self._peak = shape, peak
        self._before: LearningRate | None = None
        self._changes_at = 0

    def keep_before(self, step: int, before: "LearningRate") -> None:
        """Use another schedule for the updates before `step`: those that a resumed run had pending."""
        self._before, self._changes_at = before, step

    def __call__(self, update: int) -> float:
        """The rate of an update, numbered from 0."""
        if self._before is not None and update < self._changes_at:
            return self._before(update)
        return self._peak * lr_multiplier(self._shape, update)
