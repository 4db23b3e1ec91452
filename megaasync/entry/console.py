"""A console that cannot be written never ends a run: full disks behind stdout, readers that left, closed streams."""

import os
import sys
from typing import Any, TextIO


class TolerantStream:
    """A text stream that goes quiet, for good, when it can no longer be written; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.fault: OSError | ValueError | None = None  # why it has gone quiet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or do nothing; letters that the stream's encoding does not have become `?`."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write every line, or do nothing."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or do nothing."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        """Lead the stream to nowhere: what its buffer still holds must not fail again, at the latest at the end."""
        self.fault = self.fault or error
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):  # it is closed, or has no descriptor
            self._stream = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process


def tolerate_console() -> None:
    """Make stdout and stderr tolerant, and see to it that descriptors 0, 1 and 2 are open.

    A file that is opened while one of them is closed would get its number, and then everybody's error messages.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, mode)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # Python found it closed
            stream = open(descriptor, "w", closefd=False)  # noqa: SIM115 - lives as long as the process
        if not isinstance(stream, TolerantStream):
            setattr(sys, name, TolerantStream(stream))


def fail_if_unread() -> None:
    """After an answer that was all that was asked for: end with status 1 if it could not be written.

    A reader that has seen enough, as `head` has, is no fault.

    Raises:
        SystemExit: it could not.
    """
    sys.stdout.flush()
    fault = getattr(sys.stdout, "fault", None)
    if fault is not None and not isinstance(fault, BrokenPipeError):
        print(f"error: the output cannot be written: {fault}", file=sys.stderr)
        raise SystemExit(1)
