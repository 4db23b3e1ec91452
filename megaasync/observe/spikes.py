"""Loss spikes: batches whose loss is far above what the batches before had."""

from collections import deque
from math import isfinite
from statistics import median

_WINDOW = 100
_FEWEST = 20  # losses before anything is called a spike
_TO_SIGMA = 1.4826  # of a normal distribution, from the median absolute deviation


class SpikeWatch:
    """Compares every loss with the median of the last hundred, in robust standard deviations."""

    def __init__(self, threshold: float | None) -> None:
        """A watch.

        Args:
            threshold: standard deviations above the median that make a spike; None never finds one.
        """
        self._threshold = threshold
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def look(self, loss: float) -> tuple[float, float] | None:
        """(median before, standard deviations above it) if this loss is a spike; it then belongs to the next's past.

        The median hardly moves with a few spikes, so that a lasting rise is found again and again and then taken as
        the new normal.
        """
        if not isfinite(loss):
            return None
        found = None
        if self._threshold is not None and len(self._losses) >= _FEWEST:
            middle = median(self._losses)
            sigma = _TO_SIGMA * median(abs(earlier - middle) for earlier in self._losses)
            # a standard deviation below a thousandth of the loss is a window without noise
            above = (loss - middle) / max(sigma, 1e-3 * abs(middle), 1e-12)
            if above > self._threshold:
                found = middle, above
        self._losses.append(loss)
        return found
