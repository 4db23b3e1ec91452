"""One FIFO per peer and direction, fixed shape, no handshake: order alone says which message is which.

Receives are posted ahead, as far as they are permitted; a send is waited for only when many more have been made after
it. Stages on one rank hand tensors over without a message.
"""

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from megaasync.distributed import TransportError


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

    def __init__(
        self, peer: int, spec: TensorSpec, group: dist.ProcessGroup, *, prefetch_recvs: int, timeout: timedelta | None
    ) -> None:
        """A channel's end.

        Args:
            peer: rank in the default group.
            spec: of every message.
            group: of this direction.
            prefetch_recvs: receives that wait for their message while the rank computes.
            timeout: longest wait for one message, see `wait`.
        """
        self.peer = peer
        self._spec, self._group = spec, group
        self._prefetch_recvs, self._timeout = prefetch_recvs, timeout
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()
        self._permitted = 0  # and not posted

    def permit(self, num_messages: int = 1) -> None:
        """So many more receives may be posted; some are at once.

        Raises:
            TransportError: the peer is gone.
        """
        self._permitted += num_messages
        self._post()

    def _post(self) -> None:
        while self._permitted and len(self._posted) < self._prefetch_recvs:
            buffer = self._spec.empty()
            try:
                work = dist.irecv(buffer, self.peer, group=self._group)
            except RuntimeError as error:
                raise TransportError("the connection is lost", peer=self.peer, is_lost=True) from error
            self._posted.append((work, buffer))
            self._permitted -= 1

    def recv(self) -> Tensor:
        """The next message, for which a receive was permitted; waits for it.

        Raises:
            TransportError: it did not come in time, or the peer is gone.
        """
        work, buffer = self._posted.popleft()
        self._post()
        wait(work, self._timeout, peer=self.peer)
        return buffer


def wait(work: dist.Work, timeout: timedelta | None, *, peer: int | None) -> None:
    """Wait for one message or collective.

    Args:
        work: what to wait for.
        timeout: longest wait. None leaves it to the backend: NCCL's wait only orders streams, its watchdog ends the
            process when the group's timeout is over, and a timeout here would make the host wait.
        peer: rank that is waited for; None for a collective.

    Raises:
        TransportError: it did not end in time, or a peer is gone.
    """
    try:
        _ = work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            seconds = "too long" if timeout is None else f"{timeout.total_seconds():g} s"
            raise TransportError(f"nothing came for {seconds}", peer=peer) from error
        raise TransportError("the connection is lost", peer=peer, is_lost=True) from error


class Sender:
    """Sends messages to one peer, without waiting for them."""

    def __init__(
        self, peer: int, spec: TensorSpec, group: dist.ProcessGroup, *, max_outstanding: int, timeout: timedelta | None
    ) -> None:
        """A channel's start.

        Args:
            peer: rank in the default group.
            spec: of every message.
            group: of this direction.
            max_outstanding: sends that need not have gone out.
            timeout: longest wait for one of them, see `wait`.
        """
        self.peer = peer
        self._spec, self._group = spec, group
        self._max_outstanding, self._timeout = max_outstanding, timeout
        self._outstanding: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Send; the tensor is kept alive, and must not be written to, until it has gone out.

        Raises:
            TransportError: the peer takes nothing for too long, or is gone.
        """
        if tensor.shape != self._spec.shape or tensor.dtype != self._spec.dtype:
            raise ValueError(f"message of {tensor.dtype} {tuple(tensor.shape)} on a channel of {self._spec}")
        tensor = tensor.contiguous()
        try:
            work = dist.isend(tensor, self.peer, group=self._group)
        except RuntimeError as error:
            raise TransportError("the connection is lost", peer=self.peer, is_lost=True) from error
        self._outstanding.append((work, tensor))
        if len(self._outstanding) > self._max_outstanding:
            wait(self._outstanding.popleft()[0], self._timeout, peer=self.peer)

    def flush(self) -> None:
        """Wait until everything has gone out."""
        while self._outstanding:
            wait(self._outstanding.popleft()[0], self._timeout, peer=self.peer)


class LocalChannel:
    """Hands tensors from one stage to the next on the same rank."""

    def __init__(self) -> None:
        self._waiting: deque[Tensor] = deque()

    def send(self, tensor: Tensor) -> None:
        """Leave a tensor for the other stage."""
        self._waiting.append(tensor)

    def recv(self) -> Tensor:
        """The oldest one left."""
        return self._waiting.popleft()
