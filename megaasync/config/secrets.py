"""Secrets: an environment variable's name may be written down, its value never.

A value that is given in `cluster.env` moves into this process's environment, which sbatch and docker hand on, and its
name into `cluster.secrets`; nothing that is written, shown or sent afterwards has it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megaasync.config.schema import ConfigError

_WORDS = frozenset(
    {"KEY", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS"}
)
_SHORTEST = 6  # letters of a value that is looked for elsewhere; shorter ones stand everywhere by chance


def is_secret(name: str) -> bool:
    """Whether a variable holds a secret, by its name: as WANDB_API_KEY does, and TOKENIZERS_PARALLELISM does not."""
    return bool(_WORDS & set(re.split(r"[_\W]+", name.upper())))


def secret_values(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that hold secrets worth looking for, and their values."""
    return {name: value for name, value in environment.items() if is_secret(name) and len(value) >= _SHORTEST}


def redacted(text: str, environment: Mapping[str, str]) -> str:
    """A text without the secrets of an environment."""
    for name, value in sorted(secret_values(environment).items(), key=lambda one: -len(one[1])):
        text = text.replace(value, f"<{name}>")
    return text


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts(one, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, key)


def take_secrets(plain: dict[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Move the secrets of a config out of it.

    Args:
        plain: the config as plain dicts; changed: values out of `cluster.env`, names into `cluster.secrets`.
        environment: of this process.

    Returns:
        What is to be put into the environment.

    Raises:
        ConfigError: a secret stands somewhere else in the config, where it would be written down.
    """
    cluster, found = plain.get("cluster"), {}
    if isinstance(cluster, dict) and isinstance(cluster.get("env"), dict) and "secrets" in cluster:
        for name in [name for name in cluster["env"] if is_secret(str(name))]:
            value = cluster["env"].pop(name)
            if value is not None:
                found[name] = str(value)
            cluster["secrets"] = [*(one for one in cluster["secrets"] or [] if one != name), name]
    for name, value in secret_values({**environment, **found}).items():
        for key, text in _texts(plain, ""):
            if value in text:
                raise ConfigError(
                    f"{key}: holds the value of {name}, which would be written into files that others can read; put "
                    f"the name into cluster.secrets=[{name}] instead, the job has its value in its environment"
                )
    return found
