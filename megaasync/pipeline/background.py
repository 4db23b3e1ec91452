"""A thread that does one thing after another while the rank goes on computing.

torch releases the interpreter's lock inside its kernels and collectives, so on a CPU the thread runs beside forwards
and backwards; on a GPU it feeds a stream of its own.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch


class BackgroundStream:
    """One thread and, on a GPU, one stream; work is done in the order in which it was given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: SimpleQueue[tuple[Callable[[], Any], Future, Any] | None] = SimpleQueue()
        # a daemon: a rank that fails must not wait for a collective that its peers will never join
        threading.Thread(target=self._run, daemon=True, name="background").start()

    def submit(self, function: Callable[[], Any]) -> Future:
        """Do it after all that was given before, and after what the caller's stream was given by now."""
        future: Future = Future()
        given = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        self._work.put((function, future, given))
        return future

    def record_event(self) -> Any:
        """From the thread: what `wait_event` makes another stream wait for."""
        return None if self._stream is None else self._stream.record_event()

    def wait_event(self, event: Any) -> None:
        """Make the caller's stream wait for what `record_event` gave."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def close(self) -> None:
        """End the thread after all that was given."""
        self._work.put(None)

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            while (item := self._work.get()) is not None:
                function, future, given = item
                if given is not None:
                    self._stream.wait_event(given)
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
                del item, function, future, given  # they hold the caller's objects
