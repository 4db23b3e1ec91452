"""Fixtures that several files share."""

from tests.support.long_runs import long_run  # noqa: F401
from tests.support.restarts import eight_steps, started, with_two  # noqa: F401
