"""Slow checks are chosen by area: `pytest -m slow --area engine`."""

import pytest

AREAS = ("engine", "layouts", "study", "survive", "cluster", "data", "out")


def pytest_addoption(parser):
    parser.addoption("--area", choices=AREAS, help="run the slow checks of this area only")


def pytest_collection_modifyitems(config, items):
    area = config.getoption("--area")
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is not None and area is not None and mark.args != (area,):
            item.add_marker(pytest.mark.skip(reason=f"of area {mark.args[0]}"))
