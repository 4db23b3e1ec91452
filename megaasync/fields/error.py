"""The error for what a user has asked for."""


class ConfigError(ValueError):
    """A wrong configuration; the message names key, value and remedy."""
