"""The engine: stages, weight versions, gradient buffers, and the executor that runs a schedule's table."""


class TrainingError(RuntimeError):
    """The run cannot go on: a number is not finite."""


class MemoryFullError(RuntimeError):
    """A device has no memory left; the same run would come to the same place again."""
