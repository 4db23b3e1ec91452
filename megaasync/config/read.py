"""A strict reader: a plain dict into frozen dataclasses. Unknown keys, missing keys and wrong types are errors."""

import difflib
import math
import types
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

from megaasync.fields import ConfigError, hints_of

# what other frameworks call our keys
_OTHER_WORDS = {
    "learning_rate": "lr", "max_lr": "lr", "wd": "weight_decay", "batch_size": "global_batch_size",
    "max_steps": "steps", "num_steps": "steps", "train_iters": "steps", "iterations": "steps", "seq_len": "seq_length",
    "sequence_length": "seq_length", "max_seq_len": "seq_length", "n_layers": "num_layers", "layers": "num_layers",
    "hidden_dim": "hidden_size", "d_model": "hidden_size", "heads": "num_heads", "n_heads": "num_heads",
    "tp": "tensor", "pp": "pipeline", "ep": "expert", "dp": "data", "tensor_parallel": "tensor",
    "pipeline_parallel": "pipeline", "expert_parallel": "expert", "data_parallel": "data", "precision": "dtype",
    "grad_clip": "clip_grad_norm", "clip_grad": "clip_grad_norm", "max_grad_norm": "clip_grad_norm",
    "save_interval": "interval", "gpus": "gpus_per_node", "time_limit": "time", "walltime": "time",
    "image": "container_image", "vocabulary": "vocab_size", "blend": "path", "tokenizer_path": "tokenizer",
}  # fmt: skip


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean X?`, or the empty string if nothing is near."""
    choices = list(choices)
    group, _, last = word.rpartition(".")
    meant = _OTHER_WORDS.get(last.lower())
    if meant is not None and (f"{group}.{meant}" if group else meant) in choices:
        return f"; did you mean {group}.{meant}?" if group else f"; did you mean {meant}?"
    same = [choice for choice in choices if choice.lower() == word.lower()]
    if same:
        return f"; did you mean {same[0]}?"
    siblings = {choice.rpartition(".")[2]: choice for choice in choices if choice.rpartition(".")[0] == group}
    near = [siblings[match] for match in difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(word, choices, n=1, cutoff=0.8)
    # a key without its group, as lr for optimizer.lr
    near = near or [choice for choice in choices if choice.rpartition(".")[2] == word]
    return f"; did you mean {near[0]}?" if near else ""


def listed(choices: Iterable[Any]) -> str:
    """Choices for a message: a, b or c."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def is_union(annotation: Any) -> bool:
    """Whether a type is written with `|`, `Union` or `Optional`."""
    return get_origin(annotation) in (Union, types.UnionType)


def _is_dataclass_type(annotation: Any) -> TypeGuard[type]:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _dataclass_by_name(options: list[type], value: Any, key: str) -> type:
    """Pick the dataclass whose `name` literal equals value['name']."""
    by_name = {get_args(hints_of(option)["name"])[0]: option for option in options}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{key}: expected a group with a name, got {value!r}; choose {key}={listed(by_name)}")
    if value["name"] not in by_name:
        name = value["name"]
        raise ConfigError(f"{key}={name}: unknown {key}{did_you_mean(str(name), by_name)}; choose {listed(by_name)}")
    return by_name[value["name"]]


def _read_scalar(annotation: type, value: Any, key: str) -> Any:
    if annotation is float and type(value) is int:
        return float(value)
    if annotation is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 (no point) as a string; users mean the number.
        number = None
        with suppress(ValueError):
            number = float(value)
        if number is not None:
            return _read_scalar(float, number, key)
    if annotation is int and type(value) is float and value.is_integer():
        return int(value)  # 1e3 is a whole number
    if annotation is str and type(value) is int:
        return str(value)  # text of digits
    if annotation is float and type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{key}={value}: expected a finite number")
    if type(value) is annotation:
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    got = "null" if value is None else f"{value!r}"
    remedy = f"; put quotes around it, as in '{key}=\"{value}\"'" if annotation is str and value is not None else ""
    raise ConfigError(f"{key}={got}: expected {words[annotation]}{remedy}")


def read_value(annotation: Any, value: Any, key: str) -> Any:
    """One value of a type, as `read` reads those of a dataclass's fields.

    Raises:
        ConfigError: names the key, the value and what would be right.
    """
    if annotation is type(None):
        if value is None:
            return None
        raise ConfigError(f"{key}={value!r}: expected null")
    if is_union(annotation):
        options = get_args(annotation)
        if value is None and type(None) in options:
            return None
        options = tuple(option for option in options if option is not type(None))
        classes = [option for option in options if _is_dataclass_type(option)]
        if len(classes) > 1:
            return read(_dataclass_by_name(classes, value, key), value, key)
        errors = []
        for option in options:
            try:
                return read_value(option, value, key)
            except ConfigError as error:
                errors.append(str(error))
        raise ConfigError(errors[0] if len(options) == 1 else " or ".join(errors))
    if _is_dataclass_type(annotation):
        return read(annotation, value, key)
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        if value in choices:
            return value
        raise ConfigError(f"{key}={value}: unknown value{did_you_mean(str(value), choices)}; choose {listed(choices)}")
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        if items[-1] is Ellipsis and isinstance(value, list | tuple):
            items = items[:1] * len(value)
        elif items[-1] is Ellipsis:
            example = f'\'{key}=["a","b"]\'' if items[0] is str else f"{key}=[2,1]"
            raise ConfigError(f"{key}={value!r}: expected a list, as in {example}")
        if not isinstance(value, list | tuple) or len(value) != len(items):
            raise ConfigError(f"{key}={value!r}: expected a list of {len(items)} values, as in {key}=[0.9,0.95]")
        return tuple(
            read_value(item, element, f"{key}[{i}]") for i, (item, element) in enumerate(zip(items, value, strict=True))
        )
    if get_origin(annotation) is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{key}={value!r}: expected names and values, as in +{key}.name=value")
        item = get_args(annotation)[1]
        return (
            value
            if item is Any
            else {name: read_value(item, element, f"{key}.{name}") for name, element in value.items()}
        )
    return _read_scalar(annotation, value, key)


def read(cls: type, value: Any, key: str = "") -> Any:
    """Build the dataclass `cls` from a plain dict, strictly.

    Args:
        cls: a dataclass type.
        value: plain dicts, lists and scalars, as YAML gives them.
        key: dotted name of the value, for messages.

    Raises:
        ConfigError: names the key, the value and what would be right.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{key}={value!r}: expected a group of keys ({listed(f.name for f in fields(cls))})")
    hints = hints_of(cls)
    prefix = f"{key}." if key else ""
    for name in value:
        if name not in hints:
            near = did_you_mean(str(name), hints).replace("did you mean ", f"did you mean {prefix}")
            raise ConfigError(f"{prefix}{name}={value[name]!r}: unknown key{near}; known keys: {listed(hints)}")
    has_default = {each.name for each in fields(cls) if each.default is not MISSING}
    for name in hints:
        if name not in value and name not in has_default:
            raise ConfigError(f"{prefix}{name}: missing; set {prefix}{name}=...")
    given = {name: hint for name, hint in hints.items() if name in value}
    return cls(**{name: read_value(hint, value[name], prefix + name) for name, hint in given.items()})


def dotted_keys(cls: type, key: str = "") -> list[str]:
    """All keys that a user may set under a dataclass, dotted; groups included."""
    keys = []
    for name, hint in hints_of(cls).items():
        full = f"{key}.{name}" if key else name
        keys.append(full)
        options = get_args(hint) if is_union(hint) else (hint,)
        for option in options:
            if _is_dataclass_type(option):
                keys += dotted_keys(option, full)
    return list(dict.fromkeys(keys))
