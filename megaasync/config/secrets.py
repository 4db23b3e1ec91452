"""Secrets: an environment variable's name may be written down, its value never.

A value that is given in `cluster.env` moves into this process's environment, which sbatch and docker hand on, and its
name into `cluster.secrets`; nothing that is written, shown or sent afterwards has it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megaasync.config.schema import ConfigError

_WORDS = frozenset(
    {"KEY", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASS", "PASSWORD", "PASSWD", "PASSPHRASE", "PAT", "CREDENTIAL",
     "CREDENTIALS"}
)  # fmt: skip
_ENDS = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|PGPASS|_PWD)$")
_PLACES = re.compile(r"_(PATH|DIR|FILE|FOLDER|NAME|URL|ID|TYPE)$")  # say where a secret is, and not what
_SHORTEST = 16  # letters of a value that is looked for elsewhere; shorter ones stand everywhere by chance
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=(\"[^$\"]+\"|'[^']+'|[^\s$\"'][^\s$]*)")


def is_secret(name: str) -> bool:
    """Whether a variable holds a secret, by its name: as WANDB_API_KEY does, and TOKENIZERS_PARALLELISM does not."""
    upper = name.upper()
    if _PLACES.search(upper):
        return False
    return bool(_WORDS & set(re.split(r"[_\W]+", upper)) or _ENDS.search(upper))


def secret_values(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that hold secrets worth looking for, and their values."""
    return {name: value for name, value in environment.items() if is_secret(name) and len(value) >= _SHORTEST}


def redacted(text: str, environment: Mapping[str, str]) -> str:
    """A text without the secrets of an environment."""
    for name, value in sorted(secret_values(environment).items(), key=lambda pair: -len(pair[1])):
        text = text.replace(value, f"<{name}>")
    return text


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)


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
    if isinstance(cluster, dict) and isinstance(cluster.get("env"), dict):
        for name in [name for name in cluster["env"] if is_secret(str(name))]:
            value = cluster["env"].pop(name)
            if value is not None:
                found[name] = str(value)
            cluster["secrets"] = [*(secret for secret in cluster.get("secrets") or [] if secret != name), name]
        for line in cluster.get("setup") or ():
            match = _ASSIGNED.search(str(line))
            if match is not None and is_secret(match.group(1)):
                name = match.group(1)
                raise ConfigError(
                    f"cluster.setup: gives {name} a value that would be written into files that others can read; "
                    f"export it where you submit from, and set cluster.secrets=[{name}]"
                )
    for name, value in secret_values({**environment, **found}).items():
        for key, text in _texts(plain, ""):
            if value in text:
                has_list = isinstance(cluster, dict) and "env" in cluster
                remedy = f"put its name into cluster.secrets=[{name}] instead" if has_list else "leave it out there"
                raise ConfigError(
                    f"{key}: holds the value of {name}, which would be written into files that others can read; "
                    f"{remedy}: the run has it in its environment"
                )
    return found
