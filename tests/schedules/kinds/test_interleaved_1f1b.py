"""interleaved_1f1b: the formula of its bubble."""

import pytest

from megaasync.schedules import schedule_metrics
from tests.support.tables import SIZES, build


@pytest.mark.parametrize("v", [2, 3])
def test_bubble_is_the_formula(v):
    for p, m in SIZES:
        if m % p == 0:
            figures = schedule_metrics(build("interleaved_1f1b", p, m, v))
            assert figures.bubble == pytest.approx((p - 1) / (v * m + p - 1)), (p, m)
            assert figures.versions == (1,) * (v * p)
