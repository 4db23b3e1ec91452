"""What of a config decides a run's numbers, as against where it runs and what it writes down."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaasync.config.plain import in_current_form, to_plain
from megaasync.config.schema import Config

# groups and keys that may differ between two starts of the same run; everything else decides its numbers
_NOT_DECISIVE = ("run", "cluster", "logging", "checkpoint", "debug", "dry_run")
_NOT_DECISIVE_OF = {"train": ("time_limit",), "parallel": ("timeout_seconds", "p2p_channels"), "data": ("cache_dir",)}


def without(group: Any, names: Sequence[str]) -> Any:
    """A group of keys less some of them; what is no group stays as it is."""
    return {key: value for key, value in group.items() if key not in names} if isinstance(group, Mapping) else group


def decisive(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config decides a run's numbers."""
    return {
        group: without(value, _NOT_DECISIVE_OF.get(group, ()))
        for group, value in plain.items()
        if group not in _NOT_DECISIVE
    }


def config_hash(config: Config) -> str:
    """Hash what decides a run's numbers, and not where it runs or what it writes."""
    return hashlib.sha256(json.dumps(decisive(to_plain(config)), sort_keys=True).encode()).hexdigest()[:16]


def first_difference(written: Mapping[str, Any], config: Config) -> str | None:
    """The first setting that decides numbers and differs from a config that was written down; None if none does."""

    def compare(key: str, then: Any, here: Any) -> str | None:
        if isinstance(then, Mapping) and isinstance(here, Mapping):
            names = sorted({*then, *here}, key=str)
            found = (compare(f"{key}.{name}" if key else str(name), then.get(name), here.get(name)) for name in names)
            return next((setting for setting in found if setting), None)
        then, here = (list(setting) if isinstance(setting, tuple) else setting for setting in (then, here))
        return None if then == here else f"{key}={here}, begun with {key}={then}"

    return compare("", decisive(in_current_form(written)), decisive(to_plain(config)))
