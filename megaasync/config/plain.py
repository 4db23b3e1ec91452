"""A config as plain dicts, for files and other programs: the dataclasses are the config, this is its written form."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, get_args

from megaasync.config.read import read_value
from megaasync.config.schema import Config
from megaasync.fields import ConfigError, hints_of


def _lists(value: Any) -> Any:
    """Tuples become lists, as YAML and JSON have them."""
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def to_plain(config: Config) -> dict[str, Any]:
    """The config in dicts, lists and scalars, from which `read` makes an equal one again."""
    return _lists(asdict(config))


def in_current_form(written: Mapping[str, Any]) -> dict[str, Any]:
    """A config that this or an earlier version has written down, with today's defaults for keys that came later.

    Key by key: what today's schema cannot read, or has no default for, stays as it is or missing, and does not keep
    the rest from being compared.
    """
    return _group(Config, written, "")


def _group(cls: type, written: Mapping[str, Any], key: str) -> dict[str, Any]:
    hints, defaults = hints_of(cls), {each.name: each.default for each in fields(cls)}
    found = {name: _lists(value) for name, value in defaults.items() if value is not MISSING}
    return found | {name: _current(hints.get(name), value, f"{key}{name}") for name, value in written.items()}


def _current(hint: Any, value: Any, key: str) -> Any:
    """One value, of a group or a key that may be unknown by now."""
    if hint is None:
        return value
    if isinstance(value, Mapping):
        options = [arg for arg in (get_args(hint) or (hint,)) if isinstance(arg, type) and is_dataclass(arg)]
        named = [option for option in options if value.get("name") in get_args(hints_of(option).get("name"))]
        if len(options) == 1 or named:
            return _group((named or options)[0], value, f"{key}.")
    try:
        return _lists(read_value(hint, value, key))
    except ConfigError:
        return value
