"""Which choices a field has when a catalog knows them: `Annotated[str, NameOf(...)]`, `Annotated[Base, OneOf(...)]`."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class NameOf:
    """The field holds one of these names."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """The field is a group, one of these dataclasses, told apart by their `name`."""

    classes: tuple[type, ...]


def hints_of(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields, by name; those with choices as the Literal or the union that they stand for."""
    return {name: _as_hint(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def _as_hint(hint: Any) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    base, *metadata = get_args(hint)
    for choice in metadata:
        if isinstance(choice, NameOf):
            return Literal[choice.names]
        if isinstance(choice, OneOf):
            return Union[choice.classes]  # noqa: UP007 - of a tuple that is known only now
    return base
