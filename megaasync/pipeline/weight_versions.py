"""Weight versions in slots: K replicas of a stage's module, version v in slot v mod K.

Nothing is swapped around a forward: a module in use is never written to, so a microbatch's forward, backward and
recomputation all see one version (docs/method.md, the version trap). All slots start equal.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from megaasync.optim.flat_param_layout import FlatParamLayout


def _groups_of(module: nn.Module) -> dict[int, Any]:
    """Process groups that layers hold, for copies to hold too: they talk to the same ranks."""
    held = (value for submodule in module.modules() for value in vars(submodule).values())
    return {id(value): value for value in held if isinstance(value, dist.ProcessGroup)}


class WeightVersions:
    """Replicas of one stage's module, each with its parameters in one flat buffer.

    Attributes:
        num_slots: versions held at once.
    """

    def __init__(self, module: nn.Module, layout: FlatParamLayout, *, num_slots: int) -> None:
        self.num_slots = num_slots
        self._modules = [module, *(copy.deepcopy(module, _groups_of(module)) for _ in range(num_slots - 1))]
        self._flat = [self._flatten_(replica, layout) for replica in self._modules]

    @staticmethod
    def _flatten_(module: nn.Module, layout: FlatParamLayout) -> Tensor:
        """Move a module's parameters, in place, into one buffer."""
        parameters = list(module.parameters())
        flat = torch.zeros(layout.size, dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, view in zip(parameters, layout.views(flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        return flat

    def module(self, version: int) -> nn.Module:
        """The module that holds `version`."""
        return self._modules[version % self.num_slots]

    def flat(self, version: int) -> Tensor:
        """[layout.size] weights of `version`; writing here makes the slot hold that version."""
        return self._flat[version % self.num_slots]

    @property
    def modules(self) -> list[nn.Module]:
        """All replicas, by slot."""
        return self._modules
