"""zbv: no pause but its flush."""

from megaasync.schedules import schedule_metrics
from tests.support.tables import SIZES, build


def test_wastes_little_more_than_its_flush():
    """At best every rank works without a pause between a start and an end that are P - 1 units apart."""
    for p, m in SIZES:
        if m >= p:
            period = schedule_metrics(build("zbv", p, m)).period
            assert 6 * m + p - 1 <= period <= 6 * m + p - 1 + 3, (p, m)
