"""All channels of one rank: one FIFO per peer and direction, and local ones between its own stages."""

import itertools
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor
from torch import distributed as dist

from megaasync.distributed.p2p import LocalChannel, Receiver, Sender, TensorSpec


@dataclass(frozen=True, slots=True)
class Transport:
    """How messages travel.

    Attributes:
        spec: of every activation and activation gradient.
        prefetch_recvs: receives per channel that wait for their message while the rank computes.
        max_outstanding: sends per channel that need not have gone out.
        timeout: longest wait for another rank; None leaves that to the backend.
    """

    spec: TensorSpec
    prefetch_recvs: int
    max_outstanding: int
    timeout: timedelta | None


def group_name(direction: str, *, sender: int, receiver: int) -> str:
    """Which process group a message travels in.

    Two ranks never send to each other in one group: NCCL runs what two ranks exchange in a group in one order, and
    receives that both have posted ahead would wait for each other.
    """
    return f"{direction}_{'up' if receiver > sender else 'down'}"


def group_names(rank_of_stage: tuple[int, ...]) -> list[str]:
    """The groups that a placement of stages needs."""
    names = set()
    for rank, other in itertools.pairwise(rank_of_stage):
        if rank != other:
            names.add(group_name("forward", sender=rank, receiver=other))
            names.add(group_name("backward", sender=other, receiver=rank))
    return sorted(names)


class Channels:
    """Where each stage of a rank takes its messages from and sends them to.

    Directions are "forward" (activations) and "backward" (their gradients). Stages that talk to one peer share a
    channel; the schedule's order is what tells their messages apart (rule `fifo`).

    Attributes:
        peers: rank in the default group of each rank on the pipeline axis.
    """

    def __init__(
        self,
        rank_of_stage: tuple[int, ...],
        *,
        rank: int,
        transport: Transport,
        peers: tuple[int, ...],
        groups: dict[str, dist.ProcessGroup | None],
    ) -> None:
        """Open the channels of one rank.

        Args:
            rank_of_stage: of all stages of the model.
            rank: this one, on the pipeline axis.
            transport: how messages travel.
            peers: rank in the default group of each rank on the pipeline axis.
            groups: a process group per name of `group_names`, or None for a single rank.
        """
        self._transport, self._groups, self._rank, self.peers = transport, groups, rank, peers
        self._receivers: dict[tuple[str, int], Receiver] = {}  # by direction and peer
        self._senders: dict[tuple[str, int], Sender] = {}
        self._into: dict[tuple[str, int], Receiver | LocalChannel] = {}  # by direction and stage
        self._out_of: dict[tuple[str, int], Sender | LocalChannel] = {}
        links = set()  # of all ranks: group, sender, receiver
        for stage in range(len(rank_of_stage) - 1):
            for direction, source, target in (("forward", stage, stage + 1), ("backward", stage + 1, stage)):
                owners = rank_of_stage[source], rank_of_stage[target]
                if owners[0] != owners[1]:
                    links.add((group_name(direction, sender=owners[0], receiver=owners[1]), *owners))
                if owners == (rank, rank):
                    self._out_of[direction, source] = self._into[direction, target] = LocalChannel()
                elif owners[0] == rank:
                    self._out_of[direction, source] = self._sender(direction, owners[1])
                elif owners[1] == rank:
                    self._into[direction, target] = self._receiver(direction, owners[0])

        self._links = sorted(links)

    def _sender(self, direction: str, peer: int) -> Sender:
        key, transport = (direction, peer), self._transport
        if key not in self._senders:
            self._senders[key] = Sender(
                self.peers[peer],
                transport.spec,
                self._groups[group_name(direction, sender=self._rank, receiver=peer)],
                max_outstanding=transport.max_outstanding,
                timeout=transport.timeout,
            )
        return self._senders[key]

    def _receiver(self, direction: str, peer: int) -> Receiver:
        key, transport = (direction, peer), self._transport
        if key not in self._receivers:
            self._receivers[key] = Receiver(
                self.peers[peer],
                transport.spec,
                self._groups[group_name(direction, sender=peer, receiver=self._rank)],
                prefetch_recvs=transport.prefetch_recvs,
                timeout=transport.timeout,
            )
        return self._receivers[key]

    @property
    def max_outstanding(self) -> int:
        """Sends per channel that need not have gone out."""
        return self._transport.max_outstanding

    def connect(self) -> None:
        """Send one message through every channel, all ranks in one order.

        The first message between two ranks makes a connection, for which NCCL blocks both hosts; without an order they
        could wait for each other.
        """
        probe = self._transport.spec.empty().zero_()
        for group, sender, receiver in self._links:
            if sender == self._rank:
                dist.send(probe, self.peers[receiver], group=self._groups[group])
            elif receiver == self._rank:
                dist.recv(probe, self.peers[sender], group=self._groups[group])

    def recv(self, direction: str, stage: int) -> Tensor:
        """The next message for a stage."""
        return self._into[direction, stage].recv()

    def send(self, direction: str, stage: int, tensor: Tensor) -> None:
        """Send what a stage has made to the stage after (forward) or before it (backward)."""
        self._out_of[direction, stage].send(tensor)

    def permit(self, direction: str, peer: int) -> None:
        """Post one more receive for a message from a rank of the pipeline, as soon as few enough wait for theirs."""
        self._receivers[direction, peer].permit()

    def permit_for(self, direction: str, stage: int, num_messages: int) -> None:
        """The same for the next messages of a stage, if they come from another rank."""
        source = self._into.get((direction, stage))
        if isinstance(source, Receiver):
            source.permit(num_messages)

    def flush(self) -> None:
        """Wait until all messages have gone out: peers need them to come to the step at which this rank ends."""
        for sender in self._senders.values():
            sender.flush()
