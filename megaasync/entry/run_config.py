"""A run from the resolved config.yaml of its run folder: the same bytes that were planned, whatever changed since.

`python -m megaasync.pretrain --run-config RUN/config.yaml [key=value ...]` is how a job starts: no Hydra groups, no
config folder of the user's, nothing that could be another than at the launch.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megaasync.cluster.record import LAUNCH_RECORD
from megaasync.cluster.script import FLAG
from megaasync.config import Config, ConfigError, did_you_mean
from megaasync.distributed.environment import variables
from megaasync.entry.run_folder import has_resumed_from

GOES_ON = "--goes-on"  # what the batch script adds when it starts a run again


def path_in(arguments: Sequence[str]) -> Path | None:
    """The file after --run-config; None without it.

    Raises:
        ConfigError: it is not named.
    """
    for number, argument in enumerate(arguments):
        if argument == FLAG:
            if number + 1 == len(arguments):
                raise ConfigError(f"{FLAG}: needs a file; give the config.yaml of a run folder")
            return Path(arguments[number + 1])
        if argument.startswith(f"{FLAG}="):
            return Path(argument.partition("=")[2])
    return None


def _others(arguments: Sequence[str]) -> list[str]:
    rest, skip = [], False
    for argument in arguments:
        if skip or argument.startswith(f"{FLAG}=") or argument == GOES_ON:
            skip = False
        elif argument == FLAG:
            skip = True
        else:
            rest.append(argument)
    return rest


def sha256_of(content: bytes) -> str:
    """Hash the bytes of a config.yaml, as `megaasync.launch` records it."""
    return hashlib.sha256(content).hexdigest()


def read_run_config(path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The config of a run folder, with what is set on top.

    Args:
        path: of the config.yaml.
        arguments: of the command line; key=value each, besides the file.

    Raises:
        ConfigError: it cannot be read, or is not what was launched.
    """
    try:
        content = path.read_bytes()
        plain = yaml.safe_load(content)
    except OSError as error:
        raise ConfigError(f"{FLAG}={path}: cannot be read ({error.strerror}); give that of a run folder") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{FLAG}={path}: {str(error).splitlines()[0]}; launch the run again") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{FLAG}={path}: holds no config; give a run folder's config.yaml")
    _check_launched(path, content)
    for argument in _others(arguments):
        _set(plain, argument)
    folder = Path(plain["run"]["dir"])
    if folder.resolve() != path.absolute().parent.resolve():
        raise ConfigError(
            f"{path}: is of the run folder {folder}, and not of the one that it lies in; was that moved? Launch it "
            f"again from its checkpoints, with checkpoint.resume=FOLDER, or set run.dir={path.absolute().parent}"
        )
    if GOES_ON in arguments:
        _go_on(plain, folder)
    return plain


def _go_on(plain: dict[str, Any], folder: Path) -> None:
    """A job that starts again goes on from the run's own newest checkpoint, once it has begun from what it names."""
    requested = plain["checkpoint"]["resume"]
    if requested in ("auto", "never") or has_resumed_from(folder, Path(requested).expanduser()):
        plain["checkpoint"]["resume"] = "auto"


def check_secrets(config: Config) -> None:
    """The environment has what the config takes from it by name.

    Raises:
        ConfigError: a secret is missing.
    """
    for name in getattr(config.cluster, "secrets", ()):
        if not variables().get(name):
            raise ConfigError(f"cluster.secrets: {name} is not set in this environment; export it before the start")


def _check_launched(path: Path, content: bytes) -> None:
    """
    Raises:
        ConfigError: the file was changed after `megaasync.launch` wrote it.
    """
    try:
        expected = json.loads((path.parent / LAUNCH_RECORD).read_text()).get("config_sha256")
    except (OSError, ValueError, AttributeError):
        return  # not launched: a run folder's file that somebody starts from
    if expected is not None and sha256_of(content) != expected:
        raise ConfigError(
            f"{path}: was changed after the launch, so it is not what was planned; change the settings with "
            "python -m megaasync.launch, which plans again, or bring the file back"
        )


def _set(plain: dict[str, Any], argument: str) -> None:
    try:
        override = OverridesParser.create().parse_override(argument)
        key, value = override.key_or_group, override.value()
    except HydraException:
        raise ConfigError(f"{argument}: cannot be read as key=value") from None
    *path, last = key.split(".")
    place: Any = plain
    for part in path:
        place = place.get(part) if isinstance(place, dict) else None
    if not isinstance(place, dict) or last not in place:
        near = did_you_mean(last, place) if isinstance(place, dict) else ""
        raise ConfigError(f"{key}: is no key of this config{near}; {FLAG} takes only keys that are there")
    place[last] = str(value) if isinstance(place[last], str) else value
