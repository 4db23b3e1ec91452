"""What the tools' command lines have in common: key=value arguments, help, and one message for a mistake."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from megaasync.config import ConfigError, read
from megaasync.entry.hydra_app import explain
from megaasync.entry.spawn import Interrupted, RankFailed
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
    given: dict[str, Any] = {one.name: one.default for one in fields(cls) if one.default is not MISSING}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument}: cannot be read as key=value")
        given[key] = parse(key, value)
    return read(cls, given)


def wants_help(cls: type, page: str | None) -> bool:
    """Print what a tool is and takes, if it was asked for."""
    if not any(one in ("-h", "--help") for one in sys.argv[1:]):
        return False
    print(page)
    print(cls.__doc__)
    return True


@contextmanager
def one_message() -> Iterator[None]:
    """Turn errors into one line and a status: 2 for the user's mistakes, 1 for a failed rank, 130 for an interrupt."""
    try:
        yield
    except RankFailed as error:
        print(error.details, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except (ConfigError, ScheduleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: overrides: {explain(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except (Interrupted, KeyboardInterrupt):
        raise SystemExit(130) from None
