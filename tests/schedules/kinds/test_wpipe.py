"""wpipe: one update of delay in the model's first half, and a flush of the second half."""

import pytest

from megaasync.schedules import schedule_metrics
from tests.support.tables import SIZES, build


def test_figures_are_the_theory():
    for p, m in SIZES:
        schedule = build("wpipe", p, m)
        assert schedule.delay == (1,) * p + (0,) * p
        if m >= p:
            figures = schedule_metrics(schedule)
            assert figures.bubble == pytest.approx((p - 1) / (2 * m + p - 1))
            assert figures.versions == (2,) * p + (1,) * p
