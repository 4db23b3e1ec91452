"""The optimizers by the names that users type: every module of `kinds` has one."""

import importlib
import pkgutil
from types import ModuleType
from typing import get_args, get_type_hints

from megaasync.update_rules import kinds
from megaasync.update_rules.optimizer_config import OptimizerConfig


def _config_class(module: ModuleType) -> type[OptimizerConfig]:
    """The optimizer that a module defines.

    Raises:
        TypeError: it defines none, or several.
    """
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, OptimizerConfig) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__}: defines {len(found)} subclasses of OptimizerConfig, must be one")
    return found[0]


def _name_of(config_class: type[OptimizerConfig]) -> str:
    return get_args(get_type_hints(config_class)["name"])[0]


def _all() -> dict[str, type[OptimizerConfig]]:
    modules = (
        importlib.import_module(f"{kinds.__name__}.{module.name}") for module in pkgutil.iter_modules(kinds.__path__)
    )
    return {_name_of(found): found for found in map(_config_class, modules)}


OPTIMIZERS = _all()
