"""Every key that a user can set is read by something, is in a YAML file, and is explained by --help."""

import ast
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from megaasync.config import Config, dotted_keys, read, to_plain
from megaasync.config.read import is_union
from megaasync.entry.help import config_folder, groups
from megaasync.fields import hints_of
from tests.support.configs import small_config

PACKAGE = Path(__file__).parents[2] / "megaasync"
SCHEMA = PACKAGE / "config" / "schema"


@cache
def names_read():
    """Attributes that the package takes of anything, and names in its tables of text, outside of the schema itself."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if SCHEMA in path.parents or "hydra_configs" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name == "script.py":
                found.add(node.value)  # options of sbatch, which are read by name
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("plain.get"):
                found.add(node.args[0].value)  # of a config that may be wrong
            elif isinstance(node, ast.MatchClass):
                found.update(node.kwd_attrs)
    return found


def unread(keys):
    return [key for key in keys if key.rpartition(".")[2] not in names_read()]


def test_every_key_is_read_by_something():
    assert unread(dotted_keys(Config)) == []
    assert unread(["train.steps", "train.stepz"]) == ["train.stepz"]


def composed(*overrides):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return OmegaConf.to_container(compose("pretrain", list(overrides)), resolve=True)


def keys_of(plain, prefix=""):
    for key, value in plain.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")


def test_every_key_is_in_a_yaml_file():
    """Else Hydra refuses key=value for it."""
    found = set()
    for group, choices in groups().items():
        for choice in choices if group != "experiment" else ():
            found |= set(keys_of(composed(f"{group}={choice}")))
    assert [key for key in dotted_keys(Config) if key not in found] == []


@pytest.mark.parametrize("group", [group for group in groups() if group != "experiment"])
def test_every_choice_is_one_of_the_schema_and_back(group):
    """Schedules, clusters, optimizers and the rest: a YAML file without a dataclass or a name, or the reverse."""
    read_names = set()
    for choice in groups()[group]:
        read_names.add(getattr(read(Config, composed(f"{group}={choice}")), group).name)
    hint = hints_of(Config)[group]
    if group == "model":  # any name
        assert read_names == set(groups()[group])
        return
    options = get_args(hint) if is_union(hint) else (hint,)
    assert read_names == {name for option in options for name in get_args(hints_of(option)["name"])}


def test_a_config_written_down_is_the_config_again():
    for overrides in ({}, {"model__moe": None}, {"parallel__layers_per_stage": [4]}):
        config = small_config(**overrides)
        assert read(Config, to_plain(config)) == config
