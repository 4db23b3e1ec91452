"""Which rule and which weight decay each parameter gets, by its role in the model: a table that can be printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megaasync.config.schema import OptimizerConfig
from megaasync.distributed.sharding import Shape
from megaasync.update_rules.update_rule import UpdateRule


class Role(Enum):
    """What a parameter is in the model."""

    MATRIX = "hidden matrix"
    EXPERTS = "expert matrices"
    EMBEDDING = "embedding"
    HEAD = "head"
    ROUTER = "router"
    VECTOR = "norm or vector"


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the table. `is_matrix_rule`: the rule wants whole matrices, not a flat run of elements."""

    role: Role
    rule: UpdateRule
    weight_decay: float
    is_matrix_rule: bool


def route_parameters(roles: Mapping[str, Role], optimizer: OptimizerConfig) -> dict[str, Route]:
    """Assign each parameter its rule and weight decay.

    Norms and other vectors get no weight decay; everything else does. Under matrix rules, hidden matrices and
    expert matrices get that rule, the rest goes to AdamW with the same lr.

    Args:
        roles: by name of the parameter (`megaasync.models.parameters.roles_of`).
        optimizer: the optimizer group of the config.
    """
    rules = optimizer.rules()
    table = {}
    for name, role in roles.items():
        decay = 0.0 if role is Role.VECTOR else optimizer.weight_decay
        if rules.matrices is not None and role in (Role.MATRIX, Role.EXPERTS):
            table[name] = Route(role, rules.matrices, decay, is_matrix_rule=True)
        else:
            table[name] = Route(role, rules.elements, decay, is_matrix_rule=False)
    return table


def render_routing(table: Mapping[str, Route], shapes: Mapping[str, Shape]) -> str:
    """The table as text: rule, decay, name, shape."""
    rows = [
        f"{type(route.rule).__name__:6} decay {route.weight_decay:<6g} {route.role.value:16} {name} "
        f"{'x'.join(map(str, shapes[name]))}"
        for name, route in table.items()
    ]
    return "\n".join(rows)
