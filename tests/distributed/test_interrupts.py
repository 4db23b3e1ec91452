"""An interrupt whose exception Python loses still ends the program."""

import signal
import subprocess
import sys
from typing import ClassVar

import pytest

from megaasync.distributed.interrupts import NotedInterrupts, Stop, note_interrupts, noted_by
from megaasync.entry.spawn import Interrupted, spawn_ranks
from megaasync.train.worker import _stop_on_signals
from tests.support.cli import REPOSITORY, environment


@pytest.fixture
def handlers():
    numbers = (signal.SIGINT, signal.SIGUSR1)
    touched = (*numbers, signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in touched}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


class Loses:
    """Its finalizer is interrupted, and exceptions of finalizers are ignored."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_interrupt_is_remembered_and_no_rank_is_started(handlers):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    noted = note_interrupts(*handlers)
    assert noted_by([noted, signal.SIG_IGN]) == []
    Loses()
    assert noted.numbers == noted_by([noted, signal.getsignal(signal.SIGINT)]) == [signal.SIGINT]
    assert note_interrupts(*handlers) is noted
    with pytest.raises(Interrupted):
        spawn_ranks(print, (), world_size=1)
    assert isinstance(signal.getsignal(signal.SIGINT), NotedInterrupts)
    with pytest.raises(Stop):
        signal.raise_signal(signal.SIGUSR1)


def test_an_ignored_signal_stays_ignored(handlers):
    """And what the others note is kept by the next call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    noted = note_interrupts(*handlers)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Stop):
        signal.raise_signal(signal.SIGUSR1)
    assert note_interrupts(*handlers) is noted and noted.numbers == [signal.SIGUSR1]


def test_a_rank_stops_for_what_it_noted_before_it_could_train(handlers):
    class Trainer:
        stops: ClassVar[list] = []

        def request_stop(self, *, requeue=False):
            self.stops.append(requeue)

    for number, requeue in ((signal.SIGINT, False), (signal.SIGUSR1, True)):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        note_interrupts(*handlers).numbers.append(number)
        Trainer.stops.clear()
        _stop_on_signals(Trainer())
        assert Trainer.stops == [requeue]


def test_a_run_whose_interrupt_is_lost_while_it_is_composed_ends(tmp_path):
    code = (
        "import signal, sys\n"
        "import hydra.core.plugins as plugins\n"
        "from megaasync import pretrain\n"
        "class Loses:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "scan = plugins.Plugins._initialize\n"
        "def interrupted(self):\n"
        "    Loses()\n"
        "    return scan(self)\n"
        "plugins.Plugins._initialize = interrupted\n"
        "import megaasync.data.prepare\n"
        "validate = pretrain.validate\n"
        "pretrain.validate = lambda config: (Loses(), validate(config))[1]\n"
        "sys.argv = ['pretrain', 'train.steps=100000', 'data=synthetic', 'model=tiny_dense']\n"
        "pretrain.main()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 130 and ran.stderr.strip().endswith("interrupted"), ran.stderr
    assert "ignored" in ran.stderr, "no exception was lost"
