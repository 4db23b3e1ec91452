"""Which cases run by default and which with `scripts/test.sh --slow AREA`."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def slow_params(cases: Sequence[Any], *, kept: Collection[int], area: str = "engine") -> list[Any]:
    """The cases whose numbers are kept run by default, the others in the slow tier."""
    slow = pytest.mark.slow(area)
    return [
        case if number in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=slow)
        for number, case in enumerate(cases)
    ]
