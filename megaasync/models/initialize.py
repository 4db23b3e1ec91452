"""Initial weights that do not depend on the layout: each parameter's draw is seeded by its name in the whole model."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from megaasync.config.schema import ModelConfig
from megaasync.distributed.sharding import Shape
from megaasync.models.parameters import parameter_spec
from megaasync.optim.routing import Role


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


Part = tuple[range, ...]  # of a parameter, one range per dimension


def _draw(shape: Shape, part: Part, *, std: float, seed: int, name: str) -> Tensor:
    """float32 on the CPU, whatever the run's dtype and device."""
    whole = torch.empty(shape, dtype=torch.float32)
    whole.normal_(0.0, std, generator=_generator(seed, name))
    return whole[tuple(slice(side.start, side.stop) for side in part)]


def initialize_(
    parameters: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    seed: int,
    shapes: Mapping[str, Shape] | None = None,
    parts: Mapping[str, Part] | None = None,
) -> None:
    """Fill a stage's parameters in place, as the table in `models/parameters.py` says.

    Each expert has a draw of its own, so that a rank draws only the experts that it holds.

    Args:
        parameters: by name, in any dtype; masters of at least float32 keep every bit of the draw.
        config: of the model.
        seed: of the run.
        shapes: of the whole parameters, where these are parts.
        parts: which part of each parameter this is.
    """
    with torch.no_grad():
        for name, parameter in parameters.items():
            spec = parameter_spec(name)
            if spec.init == "ones":
                parameter.fill_(1.0)
                continue
            shape = parameter.shape if shapes is None else shapes[name]
            part = tuple(map(range, shape)) if parts is None else parts[name]
            std = spec.std(config)
            if spec.role is Role.EXPERTS:
                for mine, expert in enumerate(part[0]):
                    parameter[mine] = _draw(shape[1:], part[1:], std=std, seed=seed, name=f"{name}.{expert}")
            else:
                parameter.copy_(_draw(shape, part, std=std, seed=seed, name=name))
