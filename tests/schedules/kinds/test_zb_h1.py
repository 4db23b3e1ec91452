"""zb_h1: the formula of its bubble, for several costs of the halves of a backward."""

import pytest

from megaasync.schedules import Costs, schedule_metrics
from tests.support.tables import SIZES, build


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1, 0.5), (1, 0.8, 1), (2, 2, 1), (1, 1.2, 0.9)])
def test_bubble_is_the_formula(f, i, w):
    for p, m in SIZES:
        if m >= p:
            idle = (p - 1) * max(f + i - w, f)  # the last rank starts after P - 1 forwards, whatever W costs
            wanted = idle / (m * (f + i + w) + idle)
            bubble = schedule_metrics(build("zb_h1", p, m), costs=Costs(f, i + w, w)).bubble
            assert bubble == pytest.approx(wanted, abs=1e-12), (p, m)
