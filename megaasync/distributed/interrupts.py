"""Interrupts before a run has its own way of ending: they are noted, because Python can lose the exception.

A KeyboardInterrupt that arrives in a callback whose exceptions are ignored (an import lock's, a finalizer's) is printed
at best, and the program goes on as if nothing had been asked of it.
`megaasync/__init__.py` ends a program that is interrupted while it is imported.
"""

import signal
from collections.abc import Iterable
from types import FrameType


class Stop(KeyboardInterrupt):
    """An interrupt whose exit status is ours.

    Python ends itself by SIGINT, whatever the status, once a plain KeyboardInterrupt has left an `exec`, such as the
    ones that make dataclasses and named tuples.
    """


class NotedInterrupts:
    """A signal handler that raises, and remembers that it did.

    Attributes:
        numbers: signals that came, in order.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal and raise Stop."""
        self.numbers.append(number)
        raise Stop


def note_interrupts(*numbers: int) -> NotedInterrupts:
    """Handle these signals, unless they are ignored, as nohup does; what was noted before is kept.

    Returns:
        The handler; the one of an earlier call as long as it handles one of these signals.
    """
    former = [signal.getsignal(number) for number in (signal.SIGINT, *numbers)]
    handler = next((found for found in former if isinstance(found, NotedInterrupts)), NotedInterrupts())
    for number, found in zip((signal.SIGINT, *numbers), former, strict=True):
        if number in numbers and found is not signal.SIG_IGN:
            signal.signal(number, handler)
    return handler


def noted_by(handlers: Iterable[object]) -> list[int]:
    """Signals that former handlers have noted, and whose exceptions may have been lost since."""
    found = {id(handler): handler.numbers for handler in handlers if isinstance(handler, NotedInterrupts)}
    return [number for numbers in found.values() for number in numbers]
