"""What was asked: frozen dataclasses, a strict reader, and the rules that span groups (standard library only)."""

from megaasync.config.pipeline import phases_of
from megaasync.config.plain import to_plain
from megaasync.config.read import did_you_mean, dotted_keys, listed, read
from megaasync.config.rules import validate
from megaasync.config.schema import Config, ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "did_you_mean",
    "dotted_keys",
    "listed",
    "phases_of",
    "read",
    "to_plain",
    "validate",
]
