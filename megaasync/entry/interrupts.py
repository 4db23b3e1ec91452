"""Interrupts before a run has its own way of ending: they are noted, because Python can lose the exception.

A KeyboardInterrupt that arrives in a callback whose exceptions are ignored (an import lock's, a finalizer's) is printed
at best, and the program goes on as if nothing had been asked of it.
`megaasync/__init__.py` ends a program that is interrupted while it is imported.
"""

import signal
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
        The handler, the same one at every call.
    """
    found = signal.getsignal(signal.SIGINT)
    handler = found if isinstance(found, NotedInterrupts) else NotedInterrupts()
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    return handler


def has_noted(handler: object) -> bool:
    """Whether a signal's former handler is ours and a signal has come, which may have been lost since."""
    return isinstance(handler, NotedInterrupts) and bool(handler.numbers)
