"""Channels over gloo: order, values that survive a slow receiver, and an end that leaves nothing behind."""

import time

import torch
from torch import distributed as dist

from megaasync.distributed.groups import join_group, leave_group
from megaasync.distributed.p2p import Receiver, Sender, TensorSpec
from megaasync.entry.spawn import spawn_ranks
from megaasync.train.worker import _TIMEOUT

SPEC = TensorSpec((64, 64), torch.float32, torch.device("cpu"))


def message(number):
    return torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(number))


def slow_receiver(environment, count, unsent):
    """Rank 0 sends and drops its tensors at once; rank 1 takes its time."""
    join_group(environment, device=SPEC.device, timeout=_TIMEOUT)
    group = dist.new_group()
    intact = []
    if environment.rank == 0:
        sender = Sender(1, SPEC, group, max_outstanding=6)
        for number in range(count):
            sender.send(message(number))
            torch.full(SPEC.shape, float("nan"))  # takes freed memory, if it was freed
        sender.pad(unsent)
        sender.flush()
    else:
        receiver = Receiver(0, SPEC, group)
        receiver.expect(count + unsent)
        for number in range(count):
            if number % 10 == 0:
                time.sleep(0.05)
            intact.append(torch.equal(receiver.take(), message(number)))
        receiver.cancel()
    # the channel is clean: what is sent next arrives first
    if environment.rank == 0:
        sender.send(message(-7 % 1000))
        sender.flush()
    else:
        receiver.expect(1)
        intact.append(torch.equal(receiver.take(), message(-7 % 1000)))
    leave_group()
    return intact


def test_two_hundred_messages_arrive_unchanged_at_a_slow_receiver():
    _, intact = spawn_ranks(slow_receiver, (200, 0), world_size=2)
    assert len(intact) == 201 and all(intact)


def test_a_cut_leaves_no_message_behind():
    for unsent in (1, 2, 30):
        _, intact = spawn_ranks(slow_receiver, (5, unsent), world_size=2)
        assert len(intact) == 6 and all(intact)
