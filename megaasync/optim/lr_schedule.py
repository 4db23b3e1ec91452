"""Learning rate as a pure function of the update's number."""

import math
from collections.abc import Callable

from megaasync.config.schema import LoopConfig


def lr_multiplier(config: LoopConfig, update: int) -> float:
    """Share of the peak learning rate that an update uses.

    Linear warmup reaches the peak at update `warmup_steps - 1`; cosine then falls to `final_lr_ratio` at the last
    update; wsd stays and falls linearly over the last `decay_steps` (arXiv 2404.06395); constant stays.

    Args:
        config: the train group.
        update: number of the update, from 0; the k-th applied update uses the k-th rate under any delay.
    """
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    last, floor = config.steps - 1, config.final_lr_ratio
    if config.lr_schedule == "cosine":
        length = last - config.warmup_steps
        progress = min((update - config.warmup_steps) / length, 1.0) if length > 0 else 1.0
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_schedule == "wsd":
        left = last - update
        if left < config.decay_steps:
            return floor + (1 - floor) * max(left, 0) / config.decay_steps
    return 1.0


def lr_schedule(config: LoopConfig, *, peak: float) -> Callable[[int], float]:
    """update -> learning rate."""
    return lambda update: peak * lr_multiplier(config, update)
