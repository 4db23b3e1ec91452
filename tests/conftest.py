"""Slow checks are chosen by area: `pytest -m slow --area engine`."""

import gc
import os
import signal

import pytest

# Tests compute on tensors of a few kilobytes, three workers at a time on two cores: more threads only get in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of commands are started: bytecode that is kept saves each of them half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

AREAS = ("engine", "layouts", "study", "survive", "cluster", "data", "out")


# Started in the background of a script, or under nohup, this process has inherited signals that are ignored, and would
# hand that on to the commands that tests send them to.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _warm_fork_server():
    """Ranks that tests start share one fork server per worker: what any of them needs is imported there, once."""
    from megaasync.entry import spawn

    start = spawn._start_fork_server
    needed = [
        "megaasync.checkpoint.dcp_io",
        "megaasync.update_rules.newton_schulz",
        "torch.fx.experimental.symbolic_shapes",
        "torch.utils._device",
        "numpy.random",
        "pytest",
        "tests.parity.reference",
        "tests.support.configs",
        "tests.support.runs",
    ]
    spawn._start_fork_server = lambda preload: start([*needed, *preload])
    yield
    spawn._start_fork_server = start


def pytest_collection_finish():
    """Two thousand tests and all that they import stay: collections of rubbish need not look at them."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--area", choices=AREAS, help="run the slow checks of this area only")


def pytest_collection_modifyitems(config, items):
    area = config.getoption("--area")
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is not None and area is not None and mark.args != (area,):
            item.add_marker(pytest.mark.skip(reason=f"of area {mark.args[0]}"))
