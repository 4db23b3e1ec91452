"""One line of a table of checks; apart, so that reading it needs nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table.

    Attributes:
        name: what was measured.
        value: the figure, as text.
        goal: what it should be; empty for none.
        is_met: whether it is; None where there is no goal.
    """

    name: str
    value: str
    goal: str = ""
    is_met: bool | None = None
