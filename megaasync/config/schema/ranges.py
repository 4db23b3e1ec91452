"""Which values a field may have, written at the field: `lr: float = ranged(at_least=0)`."""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from megaasync.config.error import ConfigError


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
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"{key}={shown}: must {self._words()}{rest}")

    def _words(self) -> str:
        if self.at_most is None and self.below is None:
            return f"be at least {self.at_least}" if self.at_least is not None else f"be above {self.above}"
        opens = f"[{self.at_least}" if self.at_least is not None else f"({self.above}"
        closes = f"{self.at_most}]" if self.at_most is not None else f"{self.below})"
        return f"lie in {opens}, {closes}"


_RANGE = "range"  # where a field's metadata holds it


def ranged(
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    remedy: str = "",
    **default: Any,
) -> Any:
    """A dataclass field with bounds, and with `default=` if it has one."""
    return field(metadata={_RANGE: Range(at_least, above, at_most, below, remedy)}, **default)


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, tuple):
        yield from ((f"{key}[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, int | float):  # null and words, as auto, have no range
        yield key, value


def check_ranges(config: Any, prefix: str = "") -> None:
    """Every number of a config lies in the range of its field.

    Raises:
        ConfigError: the first that does not.
    """
    for one in fields(config):
        key, value = f"{prefix}{one.name}", getattr(config, one.name)
        if is_dataclass(value):
            check_ranges(value, f"{key}.")
        elif (allowed := _range_of(one)) is not None:
            for name, number in _numbers(key, value):
                allowed.check(name, number)


def _range_of(one: Field) -> Range | None:
    return one.metadata.get(_RANGE)
