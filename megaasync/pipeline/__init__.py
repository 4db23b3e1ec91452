"""The engine: stages, weight versions, gradient buffers, and the executor that runs a schedule's table."""
