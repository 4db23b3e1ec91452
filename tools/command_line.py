"""What the tools' command lines have in common: key=value arguments, help, and one message for a mistake."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megaasync.config import ConfigError, read
from megaasync.entry.console import tolerate_console
from megaasync.entry.hydra_app import config_folder, explain, run_app
from megaasync.entry.spawn import Interrupted, RankFailed
from megaasync.entry.text_values import yaml_mistake
from megaasync.schedules import ScheduleError

Options = TypeVar("Options")


def read_pairs(cls: type[Options], arguments: list[str], *, parse: Callable[[str, str], Any]) -> Options:
    """The arguments over the defaults of a dataclass.

    Args:
        cls: a dataclass whose fields have defaults.
        arguments: key=value each.
        parse: key and text to a value.

    Raises:
        ConfigError: names key, value and remedy.
    """
    given: dict[str, Any] = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument}: cannot be read as key=value; --help shows the keys")
        given[key] = parse(key, value)
    return read(cls, given)


def compose_plain(overrides: list[str]) -> dict[str, Any]:
    """What `megaasync.pretrain` would make of these overrides, as plain dicts."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return OmegaConf.to_container(compose("pretrain", overrides), resolve=True)


def wants_help(cls: type, page: str | None) -> bool:
    """Print what a tool is and takes, if it was asked for."""
    if not any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        return False
    tolerate_console()  # --help | head
    print(page)
    print(cls.__doc__)
    return True


def run_config_tool(task: Callable[..., None], page: str | None) -> None:
    """Compose the config of a run from the command line and call `task(config)` with it, as a plain dict."""
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        tolerate_console()
        print(f"{page}\nIt takes the keys of megaasync.pretrain:\n")
    run_app(task)


def as_flags(message: str) -> str:
    """A message about config keys, for tools that take the same things as flags."""
    flags = {"data.path=": "--input ", "data.tokenizer=": "--tokenizer ", "data.text_field=": "--text-field "}
    flags |= {"data.on_bad_bytes=": "--on-bad-bytes ", "data.cache_dir=": "--cache-dir ", "data.split=": "--split "}
    for key, flag in flags.items():
        message = message.replace(key, flag)
    return message


def check_output(key: str, path: Path, *, is_folder: bool) -> None:
    """Before the work: whether there will be a place for its result.

    Args:
        key: as the user types it.
        path: of a folder, or of a file in a folder.
        is_folder: which of them.

    Raises:
        ConfigError: names the key.
    """
    if path.exists() and path.is_dir() != is_folder:
        raise ConfigError(f"{key}={path}: is {'a file' if is_folder else 'a folder'}; choose another name")
    above = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    is_new = not is_folder and above != path.absolute().parent and not path.exists()
    if not os.access(above, os.W_OK) or str(above) == "/proc" or is_new:
        reason = f"{above} has no such folder" if is_new else f"no right to write in {above}"
        raise ConfigError(f"{key}={path}: cannot be written, {reason}; choose another place")


@contextmanager
def one_message() -> Iterator[None]:
    """Turn errors into one line and a status: 2 for the user's mistakes, 1 for a failed rank, 130 for an interrupt."""
    tolerate_console()
    try:
        yield
    except RankFailed as error:
        print(error.details, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (ConfigError, ScheduleError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except yaml.YAMLError as error:
        print(f"error: {yaml_mistake(error)}; put quotes around the value", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}; look at the path", file=sys.stderr)
        raise SystemExit(2) from None
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error, show_keys=f'{Path(sys.argv[0]).name} --help shows the keys')}", file=sys.stderr)
        raise SystemExit(2) from None
    except (Interrupted, KeyboardInterrupt):
        raise SystemExit(130) from None
