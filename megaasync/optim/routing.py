"""Which rule and which weight decay each parameter gets, by its role in the model: a table that can be printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megaasync.config.schema import (
    AdamWConfig,
    AdanConfig,
    LionConfig,
    MarsConfig,
    MuonConfig,
    NAdamConfig,
    NorMuonConfig,
    OptimizerConfig,
    SgdConfig,
    SoapConfig,
    TorchOptimizerConfig,
)
from megaasync.distributed.sharding import Shape
from megaasync.optim.elementwise_rules import AdamW, Adan, Lion, NAdam, Sgd
from megaasync.optim.matrix_rules import Mars, Muon, NorMuon
from megaasync.optim.soap import Soap
from megaasync.optim.torch_optimizer import torch_optimizer_rule
from megaasync.optim.update_rule import UpdateRule


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


def rules_of(optimizer: OptimizerConfig) -> tuple[UpdateRule, UpdateRule | None]:
    """(for elements, for hidden and expert matrices if they get another one)."""
    match optimizer:
        case SgdConfig():
            return Sgd(optimizer.momentum), None
        case AdamWConfig():
            return AdamW(optimizer.betas, optimizer.eps), None
        case NAdamConfig():
            return NAdam(optimizer.betas, optimizer.eps, optimizer.momentum_decay), None
        case LionConfig():
            return Lion(optimizer.betas), None
        case AdanConfig():
            return Adan(optimizer.betas, optimizer.eps), None
        case MuonConfig():
            matrix = Muon(optimizer.momentum, optimizer.newton_schulz_steps, optimizer.newton_schulz_precision)
            return AdamW(optimizer.betas, optimizer.eps), matrix
        case NorMuonConfig():
            o = optimizer
            matrix = NorMuon(o.momentum, o.newton_schulz_steps, o.beta2, o.eps, o.newton_schulz_precision)
            return AdamW(optimizer.betas, optimizer.eps), matrix
        case MarsConfig():
            return AdamW(optimizer.adamw_betas, optimizer.eps), Mars(optimizer.betas, optimizer.eps, optimizer.gamma)
        case SoapConfig():
            o = optimizer
            matrix = Soap(o.betas, o.eps, o.refresh_interval, o.first_basis, o.largest_side)
            return AdamW(o.adamw_betas, o.eps), matrix
        case TorchOptimizerConfig(target=target, arguments=arguments, elementwise=True):
            return torch_optimizer_rule(target, arguments, is_matrix_rule=False), None
        case TorchOptimizerConfig(target=target, arguments=arguments):
            matrix = torch_optimizer_rule(target, arguments, is_matrix_rule=True)
            return AdamW(optimizer.betas, optimizer.eps), matrix


def route_parameters(roles: Mapping[str, Role], optimizer: OptimizerConfig) -> dict[str, Route]:
    """Assign each parameter its rule and weight decay.

    Norms and other vectors get no weight decay; everything else does. Under matrix rules, hidden matrices and
    expert matrices get that rule, the rest goes to AdamW with the same lr.

    Args:
        roles: by name of the parameter (`megaasync.models.parameters.roles_of`).
        optimizer: the optimizer group of the config.
    """
    element, matrix = rules_of(optimizer)
    table = {}
    for name, role in roles.items():
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
