"""What each rank of a host does now: one slot per rank in a file that ranks and launcher map. Imports no torch.

When a rank hangs or dies, what all of them did last tells why.
"""

import mmap
import struct
from pathlib import Path

_SLOT = struct.Struct("<Qd112s")  # how often it was written; seconds that it may take, 0 for the usual; what
_TEXT_BYTES = 112


class HeartbeatFile:
    """The slots of one host's ranks."""

    def __init__(self, path: Path) -> None:
        """Map a file that `make_heartbeat_file` made."""
        with path.open("r+b") as file:
            self._slots = mmap.mmap(file.fileno(), 0)

    def write(self, slot: int, count: int, what: str, *, seconds: float) -> None:
        """Write what a rank begins; a reader may see half of it, which does no harm."""
        _SLOT.pack_into(self._slots, slot * _SLOT.size, count, seconds, what.encode()[:_TEXT_BYTES])

    def read(self, slot: int) -> tuple[int, float, str]:
        """Count, seconds that it may take, and what; count 0 before the first."""
        count, seconds, what = _SLOT.unpack_from(self._slots, slot * _SLOT.size)
        return count, seconds, what.rstrip(b"\0").decode(errors="replace")


def make_heartbeat_file(path: Path, *, num_slots: int) -> HeartbeatFile:
    """A new file of empty slots."""
    path.write_bytes(bytes(num_slots * _SLOT.size))
    return HeartbeatFile(path)


class Heartbeat:
    """One rank's slot, or nowhere for a rank that no launcher of ours watches."""

    def __init__(self, path: Path | None, *, slot: int) -> None:
        self._board, self._slot, self._count = None if path is None else HeartbeatFile(path), slot, 0

    def beat(self, what: str, *, seconds: float = 0.0) -> None:
        """This rank begins something that may take so long, or the usual time if 0, before it is said to hang."""
        if self._board is not None:
            self._count += 1
            self._board.write(self._slot, self._count, what, seconds=seconds)


class HangDetector:
    """Tells for how long each rank has begun nothing new.

    Only time in which the watcher itself ran is counted: a job that was suspended as a whole has not hung.
    """

    def __init__(self, board: HeartbeatFile, *, num_slots: int, now: float) -> None:
        self._board, self._now = board, now
        self._seen = [(0, 0.0, "")] * num_slots
        self._idle = [0.0] * num_slots

    def poll(self, now: float) -> None:
        """Look at all slots; to be called several times a second."""
        passed, self._now = min(now - self._now, 1.0), now
        for slot, before in enumerate(self._seen):
            self._seen[slot] = self._board.read(slot)
            self._idle[slot] = self._idle[slot] + passed if self._seen[slot][0] == before[0] else 0.0

    def hung(self, *, limit: float) -> int | None:
        """The rank that has begun nothing for the longest time beyond a limit in seconds, or its own; None if none."""
        beyond = [
            idle - max(limit, seconds) if count > 0 else 0.0
            for idle, (count, seconds, _) in zip(self._idle, self._seen, strict=True)
        ]
        longest = max(beyond)
        return beyond.index(longest) if longest > 0 else None

    def describe(self, slot: int) -> str:
        """What a rank did last, and for how long."""
        count, _, what = self._seen[slot]
        return "nothing yet" if count == 0 else f"{what}, begun {self._idle[slot]:.1f} s ago"
