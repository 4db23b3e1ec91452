"""Text stays text: YAML and Hydra guess types, and 24:00:00 is 86400, 0123 is 83 and 1.10 is 1.1 to them.

Which keys hold text follows from the schema. In YAML files such values are read as they are written; on the command
line they are quoted before Hydra sees them. Numbers that YAML 1.1 reads in base 8 or 60 are refused elsewhere.
"""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException
from omegaconf import _utils as omegaconf_yaml  # its loader has no public hook

from megaasync.cluster.script import hydra_quoted
from megaasync.config import Config
from megaasync.config.read import is_union
from megaasync.fields import hints_of

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_ODD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
_TEXT = "tag:yaml.org,2002:str"


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union but None; else the hint itself."""
    members = get_args(hint) if is_union(hint) else (hint,)
    return tuple(member for member in members if member is not type(None))


def _holds_text(hint: Any) -> bool:
    """Whether a field is text, a list of texts, or texts by name."""
    parts = _parts(hint)
    return bool(parts) and all(
        part is str or (get_origin(part) in (tuple, dict) and get_args(part) in ((str, ...), (str, str)))
        for part in parts
    )


def _leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every field that is no group, of all choices."""
    for name, hint in hints_of(cls).items():
        groups = [part for part in _parts(hint) if is_dataclass(part)]
        for group in groups:
            yield from _leaves(group, f"{prefix}{name}.")
        if not groups:
            yield f"{prefix}{name}", hint


@cache
def text_keys() -> frozenset[str]:
    """Dotted keys whose values are text; `cluster.env` stands for every key below it."""
    leaves = list(_leaves(Config))
    others = {key for key, hint in leaves if not _holds_text(hint)}
    return frozenset(key for key, hint in leaves if _holds_text(hint)) - others


@cache
def _text_names() -> frozenset[str]:
    """Last parts of the keys that hold text wherever they stand, for files that do not say which group they are of."""
    others = {key.rpartition(".")[2] for key, _ in _leaves(Config) if key not in text_keys()}
    return frozenset(key.rpartition(".")[2] for key in text_keys()) - others


def _as_written(node: yaml.Node) -> yaml.Node:
    """A copy in which every plain scalar at or below a node is text, but null; an anchor may serve a number too."""
    if isinstance(node, yaml.ScalarNode):
        is_null = node.style is None and node.value in _NULLS
        return yaml.ScalarNode(node.tag if is_null else _TEXT, node.value, node.start_mark, node.end_mark, node.style)
    if isinstance(node, yaml.SequenceNode):
        items = [_as_written(item) for item in node.value]
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark, node.flow_style)
    pairs = [(key, _as_written(value)) for key, value in node.value]
    return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark, node.flow_style)


def _is_odd_number(node: yaml.Node) -> bool:
    """Whether YAML reads digits in another base than they seem to have; 089 and the like are text to it."""
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None and node.tag != _TEXT
    return is_plain and _ODD_NUMBER.fullmatch(node.value) is not None


def _prepare(node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> None:
    """Make text of what a text key has; refuse odd numbers elsewhere, and anchors that hold themselves."""
    if any(node is entry for entry in above):
        raise yaml.constructor.ConstructorError(None, None, "an anchor that holds itself", node.start_mark)
    if isinstance(node, yaml.MappingNode):
        for number, (key, value) in enumerate(node.value):
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in _text_names():
                node.value[number] = (key, _as_written(value))
            else:
                _prepare(value, (*above, node))
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _prepare(entry, (*above, node))
    elif _is_odd_number(node):
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"{node.value} is not what it seems: YAML reads it in base {60 if ':' in node.value else 8}; write a "
            "plain number, or quotes around text",
            node.start_mark,
        )


def _make_loader() -> type[yaml.SafeLoader]:
    class TextLoader(_original_loader()):
        """OmegaConf's loader, with text as it is written."""

        def get_single_data(self) -> Any:
            node = self.get_single_node()
            if node is None:
                return None
            _prepare(node)
            return self.construct_document(node)

    return TextLoader


_original_loader = omegaconf_yaml.get_yaml_loader


def read_text_as_written() -> None:
    """From now on, YAML files that Hydra composes keep text as it is written; in the process of a command line."""
    omegaconf_yaml.get_yaml_loader = _make_loader


def load_yaml(text: str) -> Any:
    """A YAML text, read as Hydra's files are.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, Loader=_make_loader())


def _is_text_key(key: str) -> bool:
    return key in text_keys() or key.rpartition(".")[0] == "cluster.env"


def quoted_override(argument: str) -> str:
    """An argument of the command line, quoted if its key holds text and Hydra would take the value for a number.

    Args:
        argument: as typed.

    Example:
        >>> quoted_override("+cluster.env.OMP_PLACES=0123e1")
        '+cluster.env.OMP_PLACES="0123e1"'
    """
    key, equals, value = argument.partition("=")
    if not equals or not _is_text_key(key.lstrip("+")):
        return argument
    return f"{key}={_quoted_words(value)}"


def _quoted_words(value: str) -> str:
    """The words of a value, a sweep's or a list's, in quotes where Hydra would take them for something else."""
    if value.startswith("[") and value.endswith("]"):
        return f"[{_quoted_words(value[1:-1])}]"
    if re.search(r"""["'()\[\]{}\\]""", value.replace("${", "").replace("}", "")):
        return value  # quoted already, or more than words
    return ",".join(_quoted_word(word) for word in value.split(","))


def _quoted_word(word: str) -> str:
    text = word.strip()
    if text.startswith("~"):  # a home folder; interpolations in it stay
        return f'"{text}"'
    try:
        parsed = OverridesParser.create().parse_override(f"x={word}")
        is_other = parsed.value_type is ValueType.ELEMENT and isinstance(parsed.value(), bool | int | float)
    except HydraException:
        return word  # Hydra says what is wrong with it
    return hydra_quoted(text) if is_other else word


def yaml_mistake(error: yaml.YAMLError) -> str:
    """Where and what a mistake in a YAML file is.

    Args:
        error: of PyYAML, with or without a place.
    """
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return problem if mark is None else f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {problem}"
