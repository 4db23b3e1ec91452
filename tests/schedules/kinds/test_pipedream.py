"""pipedream: delay and buffers that grow towards the first stage."""

import pytest

from megaasync.schedules import schedule_metrics
from tests.support.tables import build


@pytest.mark.parametrize("p", [1, 2, 3, 6])
def test_figures_are_the_theory(p):
    schedule = build("pipedream", p, 1)
    assert schedule.delay == tuple(p - 1 - s for s in range(p))
    figures = schedule_metrics(schedule)
    assert figures.bubble == pytest.approx(0)
    assert figures.versions == figures.activations == tuple(p - s for s in range(p))
