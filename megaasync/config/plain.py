"""A config as plain dicts, for files and other programs: the dataclasses are the config, this is its written form."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megaasync.config.read import read
from megaasync.config.schema import Config, ConfigError


def _lists(value: Any) -> Any:
    """Tuples become lists, as YAML and JSON have them."""
    if isinstance(value, dict):
        return {key: _lists(one) for key, one in value.items()}
    return [_lists(one) for one in value] if isinstance(value, list | tuple) else value


def to_plain(config: Config) -> dict[str, Any]:
    """The config in dicts, lists and scalars, from which `read` makes an equal one again."""
    return _lists(asdict(config))


def in_current_form(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config that this or an earlier version has written down, with today's defaults for keys that came later.

    One that today's schema cannot read stays as it is, so that what differs can still be named.
    """
    try:
        return to_plain(read(Config, written))
    except ConfigError:
        return written
