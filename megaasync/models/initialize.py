"""Initial weights that do not depend on the layout: each parameter's draw is seeded by its name in the whole model."""

import hashlib
import math

import torch
from torch import nn

from megaasync.config.schema import ModelConfig

_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initialize_(module: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill a stage's parameters in place: norms with ones, the rest normal with `init_std`.

    Projections back into the residual stream divide it by sqrt(2 num_layers) (GPT-2). Draws are float32 on the CPU
    whatever the run's dtype and device.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            std = config.init_std
            if name.endswith(_RESIDUAL):
                std /= math.sqrt(2 * config.num_layers)
            draw = torch.empty(parameter.shape, dtype=torch.float32)
            draw.normal_(0.0, std, generator=_generator(seed, name))
            parameter.copy_(draw)
