"""Which values a field may have, written at the field: `lr: Annotated[float, Range(at_least=0)]`."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from megaasync.fields.error import ConfigError


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, or of each number of a tuple; None is no bound.

    Attributes:
        at_least, above, at_most, below: the bounds; the second and the last one are not values themselves.
        remedy: what else the user may do, as "set null to switch clipping off".
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    remedy: str = ""

    def check(self, key: str, value: float) -> None:
        """Raise if the value is out of bounds.

        Raises:
            ConfigError: names key, value and bounds.
        """
        is_right = (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )
        if not is_right:
            rest = f"; {self.remedy}" if self.remedy else ""
            short = f"{value:g}" if isinstance(value, float) else str(value)
            shown = short if float(short) == value else value
            raise ConfigError(f"{key}={shown}: must {self._words()}{rest}")

    def _words(self) -> str:
        if self.at_most is None and self.below is None:
            return f"be at least {self.at_least}" if self.at_least is not None else f"be above {self.above}"
        opens = f"[{self.at_least}" if self.at_least is not None else f"({self.above}"
        closes = f"{self.at_most}]" if self.at_most is not None else f"{self.below})"
        return f"lie in {opens}, {closes}"


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, tuple):
        yield from ((f"{key}[{number}]", element) for number, element in enumerate(value))
    elif isinstance(value, int | float):  # null and words, as auto, have no range
        yield key, value


def check_ranges(config: Any, prefix: str = "") -> None:
    """Every number of a config lies in the range of its field.

    Raises:
        ConfigError: the first that does not.
    """
    allowed = _ranges_of(type(config))
    for each in fields(config):
        key, value = f"{prefix}{each.name}", getattr(config, each.name)
        if is_dataclass(value):
            check_ranges(value, f"{key}.")
        elif each.name in allowed:
            for name, number in _numbers(key, value):
                allowed[each.name].check(name, number)


def _ranges_of(cls: type) -> dict[str, Range]:
    """The ranges of a dataclass's fields, by name."""
    hints = get_type_hints(cls, include_extras=True)
    found = {
        name: [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Range)]
        for name, hint in hints.items()
    }
    return {name: ranges[0] for name, ranges in found.items() if ranges}
