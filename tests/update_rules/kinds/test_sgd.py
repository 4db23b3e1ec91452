"""sgd against the two lines of its recurrence."""

import pytest

from tests.support.configs import small_config
from tests.support.trajectories import assert_equals_by_hand


def direction(o, name, g, s, t):
    s["m"] = o.momentum * s.get("m", 0) + (1 - o.momentum) * g
    return (1 - o.momentum) * g + o.momentum * s["m"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_two_lines(momentum):
    assert_equals_by_hand(small_config("sgd", optimizer__momentum=momentum), direction)
