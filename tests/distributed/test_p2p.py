"""Channels over gloo: order, values that survive a slow receiver, and an end that leaves nothing behind."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from megaasync.distributed import TransportError, groups
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group, leave_group
from megaasync.distributed.p2p import Receiver, Sender, TensorSpec
from megaasync.entry.spawn import RankFailed, spawn_ranks

TIMEOUT = timedelta(seconds=30)
POSTED = 3
SPEC = TensorSpec((64, 64), torch.float32, torch.device("cpu"))


def message(number):
    return torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(number))


def slow_receiver(environment, count):
    """Rank 0 sends and drops its tensors at once; rank 1 takes its time."""
    join_group(environment, device=SPEC.device, timeout=TIMEOUT)
    group = dist.new_group()
    intact = []
    if environment.rank == 0:
        sender = Sender(1, SPEC, group, max_outstanding=6, timeout=TIMEOUT)
        for number in range(count):
            sender.send(message(number))
            torch.full(SPEC.shape, float("nan"))  # takes freed memory, if it was freed
            assert len(sender._outstanding) <= 6, "sent tensors pile up"
        sender.flush()
    else:
        receiver = Receiver(0, SPEC, group, prefetch_recvs=POSTED, timeout=TIMEOUT)
        receiver.permit(count)
        for number in range(count):
            if number % 10 == 0:
                time.sleep(0.05)
            intact.append(torch.equal(receiver.recv(), message(number)))
            assert len(receiver._posted) == min(POSTED, count - 1 - number), "more or fewer receives than permitted"
    # the channel is clean: what is sent next arrives first
    if environment.rank == 0:
        sender.send(message(-7 % 1000))
        sender.flush()
    else:
        receiver.permit()
        intact.append(torch.equal(receiver.recv(), message(-7 % 1000)))
    leave_group()
    return intact


def test_two_hundred_messages_arrive_unchanged_at_a_slow_receiver():
    _, intact = spawn_ranks(slow_receiver, (200,), world_size=2)
    assert len(intact) == 201 and all(intact)


def silent_sender(environment, dies):
    """Rank 0 sends one message and then hangs, or dies; rank 1 wants two."""
    join_group(environment, device=SPEC.device, timeout=TIMEOUT)
    group = dist.new_group()
    if environment.rank == 0:
        sender = Sender(1, SPEC, group, max_outstanding=6, timeout=TIMEOUT)
        sender.send(message(0))
        sender.flush()
        time.sleep(0.5)
        if dies:
            os._exit(0)
        time.sleep(6)
        return None
    receiver = Receiver(0, SPEC, group, prefetch_recvs=POSTED, timeout=timedelta(seconds=2))
    receiver.permit(2)
    receiver.recv()
    start = time.monotonic()
    with pytest.raises(TransportError) as raised:
        receiver.recv()
    return str(raised.value), raised.value.peer, raised.value.is_lost, time.monotonic() - start


def test_a_message_that_does_not_come_is_an_error_in_time():
    _, (text, peer, is_lost, seconds) = spawn_ranks(silent_sender, (False,), world_size=2)
    assert (text, peer, is_lost) == ("nothing came for 2 s", 0, False)
    assert 1.9 < seconds < 30  # not the group's own sixty, however busy the machine


def test_a_dead_peer_is_an_error_at_once(tmp_path):
    """The launcher reports the death; the other rank's own error is read from a file."""
    with pytest.raises(RankFailed, match="rank 0 died without a word"):
        spawn_ranks(report_of_the_survivor, (str(tmp_path / "error"),), world_size=2)
    text, seconds = (tmp_path / "error").read_text().split("\n")
    assert text == "the connection is lost"
    assert float(seconds) < 2


def report_of_the_survivor(environment, path):
    text, _, is_lost, seconds = silent_sender(environment, True)
    assert is_lost
    Path(path).write_text(f"{text}\n{seconds}")


@pytest.mark.parametrize(("local", "address"), [(2, "127.0.0.1"), (1, "0.0.0.0")])
def test_the_store_listens_where_the_others_come_to(local, address):
    """One host: its loopback. Several, of which the first knows itself by a loopback address only: everywhere."""
    with groups._listen("127.0.0.1", 0, RankEnvironment(0, 2, 0, local, "")) as listener:
        assert listener.getsockname()[0] == address
