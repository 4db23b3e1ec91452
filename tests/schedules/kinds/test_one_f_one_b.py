"""1f1b: the formulas of its bubble and its buffers."""

import pytest

from megaasync.schedules import schedule_metrics
from tests.support.tables import SIZES, build


def test_figures_are_the_formulas():
    for p, m in SIZES:
        figures = schedule_metrics(build("1f1b", p, m))
        assert figures.bubble == pytest.approx((p - 1) / (m + p - 1)), (p, m)
        assert figures.versions == (1,) * p
        assert figures.activations == tuple(min(p - s, m) for s in range(p))
