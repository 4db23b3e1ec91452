"""Slow checks are chosen by area: `pytest -m slow --area engine`."""

import os
import signal

import pytest

# Tests compute on tensors of a few kilobytes, two workers at a time on two cores: more threads only get in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of commands are started: bytecode that is kept saves each of them half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

AREAS = ("engine", "layouts", "study", "survive", "cluster", "data", "out")


# Started in the background of a script, or under nohup, this process has inherited signals that are ignored, and would
# hand that on to the commands that tests send them to.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption("--area", choices=AREAS, help="run the slow checks of this area only")


def pytest_collection_modifyitems(config, items):
    area = config.getoption("--area")
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is not None and area is not None and mark.args != (area,):
            item.add_marker(pytest.mark.skip(reason=f"of area {mark.args[0]}"))
