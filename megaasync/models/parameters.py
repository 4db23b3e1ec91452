"""Every parameter of the model, one line each: the single place that says what a parameter is.

Sharding, initial weights, the optimizer's routing, the plan and checkpoints read this table. A new layer adds its
parameters here; a name that no line matches, or that two lines match, is refused when a stage is built.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from megaasync.config.schema import ModelConfig
from megaasync.distributed.sharding import Shape, Sharding
from megaasync.optim.routing import Role


class Gradient(Enum):
    """What each rank's backward gives, and so the axes over which a parameter's gradient is summed.

    WHOLE: the tensor-parallel ranks compute different parts of the parameter, or the same gradient of all of it.
    PARTIAL: a tensor-parallel rank sees some of the tokens or heads only, and holds all of the parameter.
    PER_SEQUENCE_PART: PARTIAL under sequence parallelism, else WHOLE.
    EXPERT: tokens of all ranks on the expert axis have already come to the rank that holds the expert.
    """

    WHOLE = "whole"
    PARTIAL = "partial"
    PER_SEQUENCE_PART = "per sequence part"
    EXPERT = "expert"

    def axes(self, *, sequence_parallel: bool) -> tuple[str, ...]:
        """Mesh axes over which the gradient is summed."""
        match self:
            case Gradient.EXPERT:
                return "data", "tensor"
            case Gradient.PER_SEQUENCE_PART if not sequence_parallel:
                return "data", "expert"
            case Gradient.WHOLE:
                return "data", "expert"
        return "data", "expert", "tensor"


# all sums that a model can need, in one order on all ranks
REDUCTIONS = tuple(kind.axes(sequence_parallel=True) for kind in (Gradient.WHOLE, Gradient.PARTIAL, Gradient.EXPERT))


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One line of the table.

    Attributes:
        pattern: the dotted name in the whole model; `*` stands for a layer's number.
        role: decides rule and weight decay (`megaasync.optim.routing`).
        axis: mesh axis over which it is split; None if every rank holds all of it.
        dim: the dimension that is split.
        gradient: decides the axes over which its gradient is summed.
        init: `ones`; `normal` with model.init_std; or `residual`, which divides that by sqrt(2 num_layers) (GPT-2).
    """

    pattern: str
    role: Role
    axis: Literal["tensor", "expert"] | None
    dim: int
    gradient: Gradient
    init: Literal["ones", "normal", "residual"]

    def matches(self, name: str) -> bool:
        """Whether a name is of this line."""
        words, wanted = name.split("."), self.pattern.split(".")
        return len(words) == len(wanted) and all(
            word.isdecimal() if want == "*" else word == want for word, want in zip(words, wanted, strict=True)
        )

    def std(self, config: ModelConfig) -> float:
        """Standard deviation of the initial values, for those that are drawn."""
        return config.init_std / (math.sqrt(2 * config.num_layers) if self.init == "residual" else 1.0)


# fmt: off
PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec("embedding.weight", Role.EMBEDDING, "tensor", 0, Gradient.WHOLE, "normal"),
    ParameterSpec("layers.*.attention_norm.weight", Role.VECTOR, None, 0, Gradient.PER_SEQUENCE_PART, "ones"),
    ParameterSpec("layers.*.attention.query.weight", Role.MATRIX, "tensor", 0, Gradient.WHOLE, "normal"),
    ParameterSpec("layers.*.attention.key.weight", Role.MATRIX, "tensor", 0, Gradient.WHOLE, "normal"),
    ParameterSpec("layers.*.attention.value.weight", Role.MATRIX, "tensor", 0, Gradient.WHOLE, "normal"),
    # of all heads, of which a tensor-parallel rank has some
    ParameterSpec("layers.*.attention.query_norm.weight", Role.VECTOR, None, 0, Gradient.PARTIAL, "ones"),
    ParameterSpec("layers.*.attention.key_norm.weight", Role.VECTOR, None, 0, Gradient.PARTIAL, "ones"),
    ParameterSpec("layers.*.attention.output.weight", Role.MATRIX, "tensor", 1, Gradient.WHOLE, "residual"),
    ParameterSpec("layers.*.mlp_norm.weight", Role.VECTOR, None, 0, Gradient.PER_SEQUENCE_PART, "ones"),
    ParameterSpec("layers.*.mlp.gate.weight", Role.MATRIX, "tensor", 0, Gradient.WHOLE, "normal"),
    ParameterSpec("layers.*.mlp.up.weight", Role.MATRIX, "tensor", 0, Gradient.WHOLE, "normal"),
    ParameterSpec("layers.*.mlp.down.weight", Role.MATRIX, "tensor", 1, Gradient.WHOLE, "residual"),
    # of a tensor-parallel rank's part of the tokens, as the experts see them
    ParameterSpec("layers.*.mlp.router.weight", Role.ROUTER, None, 0, Gradient.PARTIAL, "normal"),
    ParameterSpec("layers.*.mlp.experts.gate", Role.EXPERTS, "expert", 0, Gradient.EXPERT, "normal"),
    ParameterSpec("layers.*.mlp.experts.up", Role.EXPERTS, "expert", 0, Gradient.EXPERT, "normal"),
    ParameterSpec("layers.*.mlp.experts.down", Role.EXPERTS, "expert", 0, Gradient.EXPERT, "residual"),
    ParameterSpec("layers.*.mlp.shared.gate.weight", Role.MATRIX, "tensor", 0, Gradient.WHOLE, "normal"),
    ParameterSpec("layers.*.mlp.shared.up.weight", Role.MATRIX, "tensor", 0, Gradient.WHOLE, "normal"),
    ParameterSpec("layers.*.mlp.shared.down.weight", Role.MATRIX, "tensor", 1, Gradient.WHOLE, "residual"),
    ParameterSpec("final_norm.weight", Role.VECTOR, None, 0, Gradient.PER_SEQUENCE_PART, "ones"),
    ParameterSpec("head.weight", Role.HEAD, "tensor", 0, Gradient.WHOLE, "normal"),
)
# fmt: on


def parameter_spec(name: str, table: tuple[ParameterSpec, ...] = PARAMETERS) -> ParameterSpec:
    """The line of a parameter.

    Raises:
        ValueError: the table has no line for the name, or several.
    """
    found = [spec for spec in table if spec.matches(name)]
    if len(found) != 1:
        has = "no line" if not found else f"{len(found)} lines ({', '.join(spec.pattern for spec in found)})"
        raise ValueError(f"parameter {name}: the table in megaasync/models/parameters.py has {has} for it; give it one")
    return found[0]


def sharding_of(name: str, *, sequence_parallel: bool) -> Sharding:
    """How a parameter lies over the ranks of its stage, and over which axes its gradient is summed."""
    spec = parameter_spec(name)
    return Sharding(spec.axis, spec.dim, spec.gradient.axes(sequence_parallel=sequence_parallel))


def roles_of(shapes: Mapping[str, Shape]) -> dict[str, Role]:
    """Role of each parameter by name; a matrix or stack with a side of 1 is a vector to the optimizer."""

    def role(name: str, shape: Shape) -> Role:
        role = parameter_spec(name).role
        is_thin = role in (Role.MATRIX, Role.EXPERTS) and min(shape[-2:]) == 1
        return Role.VECTOR if is_thin else role

    return {name: role(name, shape) for name, shape in shapes.items()}


def layer_number(name: str) -> int:
    """The layer, counted over the whole model, of a parameter whose pattern has one."""
    return int(name.split(".")[1])
