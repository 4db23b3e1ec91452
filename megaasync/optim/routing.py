"""Which rule and which decay each parameter gets: by its name and shape, as a table that can be printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megaasync.config.schema import AdamWConfig, MuonConfig, SgdConfig
from megaasync.distributed.sharding import Shape
from megaasync.optim.update_rule import AdamW, Muon, Sgd, UpdateRule


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


def role_of(name: str, shape: Shape) -> Role:
    """The role of a parameter, by its name in the whole model."""
    if name.startswith("embedding."):
        return Role.EMBEDDING
    if name.startswith("head."):
        return Role.HEAD
    if ".router." in name:
        return Role.ROUTER
    if len(shape) < 2 or min(shape[-2:]) == 1:
        return Role.VECTOR
    return Role.EXPERTS if len(shape) == 3 else Role.MATRIX


def route_parameters(shapes: Mapping[str, Shape], optimizer: SgdConfig | AdamWConfig | MuonConfig) -> dict[str, Route]:
    """The routing table.

    Norms and other vectors get no weight decay; everything else does. Under muon, hidden matrices and expert matrices
    are orthogonalised, the rest goes to AdamW with the same lr.

    Args:
        shapes: parameter shapes by name.
        optimizer: the optimizer group of the config.
    """
    match optimizer:
        case SgdConfig():
            element: UpdateRule = Sgd()
        case AdamWConfig() | MuonConfig():
            element = AdamW(optimizer.betas, optimizer.eps)
    matrix = Muon(optimizer.momentum, optimizer.newton_schulz_steps) if isinstance(optimizer, MuonConfig) else None
    table = {}
    for name, shape in shapes.items():
        role = role_of(name, shape)
        takes_matrix = matrix is not None and role in (Role.MATRIX, Role.EXPERTS)
        decay = 0.0 if role is Role.VECTOR else optimizer.weight_decay
        table[name] = Route(role, matrix if takes_matrix else element, decay, takes_matrix)
    return table


def render_routing(table: Mapping[str, Route], shapes: Mapping[str, Shape]) -> str:
    """The table as text: rule, decay, name, shape."""
    rows = [
        f"{type(route.rule).__name__:6} decay {route.weight_decay:<6g} {route.role.value:16} {name} "
        f"{'x'.join(map(str, shapes[name]))}"
        for name, route in table.items()
    ]
    return "\n".join(rows)
