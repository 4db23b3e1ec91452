"""One FIFO per peer and direction, fixed shape, no handshake: order alone says which message is which.

Receives are posted ahead; a send is waited for only when many more have been made after it.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

_POSTED_AHEAD = 2  # receives that wait for their message while the rank computes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and device of every message of a channel."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """A fresh buffer for one message."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Receiver:
    """Takes messages from one peer in the order in which they were sent."""

    def __init__(self, peer: int, spec: TensorSpec, group: dist.ProcessGroup) -> None:
        self._peer, self._spec, self._group = peer, spec, group
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        self._unposted = 0

    def expect(self, num_messages: int) -> None:
        """So many more messages will come; some receives are posted at once."""
        self._unposted += num_messages
        self._post()

    def _post(self) -> None:
        while self._unposted and len(self._posted) < _POSTED_AHEAD:
            buffer = self._spec.empty()
            self._posted.append((dist.irecv(buffer, self._peer, group=self._group), buffer))
            self._unposted -= 1

    def take(self) -> Tensor:
        """The next message; waits for it."""
        work, buffer = self._posted.popleft()
        self._post()
        work.wait()
        return buffer

    def cancel(self) -> None:
        """No more messages come: the sender pads those already posted for (`Sender.pad`)."""
        self._unposted = 0
        while self._posted:
            self.take()


class Sender:
    """Sends messages to one peer, without waiting for them."""

    def __init__(self, peer: int, spec: TensorSpec, group: dist.ProcessGroup, *, max_outstanding: int) -> None:
        self._peer, self._spec, self._group = peer, spec, group
        self._max_outstanding = max_outstanding
        self._outstanding: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send; the tensor is kept alive, and must not be written to, until it has gone out."""
        if tensor.shape != self._spec.shape or tensor.dtype != self._spec.dtype:
            raise ValueError(f"message of {tensor.dtype} {tuple(tensor.shape)} on a channel of {self._spec}")
        tensor = tensor.contiguous()
        self._outstanding.append((dist.isend(tensor, self._peer, group=self._group), tensor))
        if len(self._outstanding) > self._max_outstanding:
            self._outstanding.popleft()[0].wait()

    def pad(self, num_unsent: int) -> None:
        """Answer the receives that the peer posted ahead for messages that will not be sent after all."""
        for _ in range(min(num_unsent, _POSTED_AHEAD)):
            self.send(self._spec.empty())

    def flush(self) -> None:
        """Wait until everything has gone out."""
        while self._outstanding:
            self._outstanding.popleft()[0].wait()
