"""interleaved_2bw: no bubble, two versions of every chunk, delay 1."""

import pytest

from megaasync.schedules import schedule_metrics
from tests.support.tables import SIZES, build, is_defined


def test_figures_are_the_theory():
    for p, m in SIZES:
        if is_defined("interleaved_2bw", p, m):
            schedule = build("interleaved_2bw", p, m)
            assert schedule.delay == (1,) * (2 * p)
            figures = schedule_metrics(schedule)
            assert figures.bubble == pytest.approx(0)
            assert figures.versions == (2,) * (2 * p)
