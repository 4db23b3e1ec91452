"""Activations that are made again in the backward and not kept: of whole layers, or of what is cheap in them.

`full` keeps a layer's input and runs its forward again (arXiv 1604.06174), through torch's checkpoint. `selective`
keeps every matrix product and makes the cheap results between them again (arXiv 2205.05198): norms, the gate of a
feed-forward, the tokens' copies in front of the experts. Neither changes a number: the weights are those of the same
version, nothing random is drawn, and routers are not counted twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

Mode = Literal["none", "selective", "full"]


class RecomputeHandle:
    """How to make a tensor again; the result is held until everything that saved the tensor has had it."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make, self._users = make, 0
        self._value: Tensor | None = None

    def expect(self) -> "RecomputeHandle":
        """Note that one more saved tensor refers to this handle."""
        self._users += 1
        return self

    def get(self) -> Tensor:
        """For one of those who saved it."""
        if self._value is None:
            with torch.no_grad():
                self._value = self._make()
        value = self._value
        self._users -= 1
        if self._users == 0:
            self._value = None
        return value


class Recompute:
    """What the layers of a stage keep.

    Attributes:
        mode: none, selective or full.
    """

    def __init__(self, mode: Mode = "none", checkpoint: Callable[..., Tensor] | None = None) -> None:
        """By a mode; `checkpoint` is the backend's, for `full`."""
        self.mode, self._checkpoint = mode, checkpoint
        self._recipes: dict[tuple[Any, ...], RecomputeHandle] = {}  # of the tensors in use, by where they lie

    def layer(self, module: nn.Module, x: Tensor, *others: Any) -> Tensor:
        """Run a layer on x; under `full`, only x is kept."""
        if self.mode != "full" or not torch.is_grad_enabled():
            return module(x, *others)
        return self._checkpoint(module, x, *others)

    @contextmanager
    def recompute_in_backward(self, tensor: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
        """Under `selective`, what runs inside keeps the recipe where it would save the tensor.

        Args:
            tensor: cheap to make.
            make: makes it, from what is kept anyway.
        """
        if self.mode != "selective" or not torch.is_grad_enabled():
            yield
            return
        place, is_outermost = self.storage_key(tensor), not self._recipes
        self._recipes[place] = RecomputeHandle(make)
        try:
            if is_outermost:
                with torch.autograd.graph.saved_tensors_hooks(self.pack_hook, self.unpack_hook):
                    yield
            else:
                yield
        finally:
            del self._recipes[place]

    @staticmethod
    def storage_key(tensor: Tensor) -> tuple[Any, ...]:
        """What a contiguous tensor and its views in the same order have in common."""
        return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.is_contiguous()

    def pack_hook(self, tensor: Tensor) -> Any:
        """A hook of autograd: what is kept of a tensor that is saved."""
        recipe = self._recipes.get(self.storage_key(tensor)) if tensor.numel() and tensor.is_contiguous() else None
        return tensor if recipe is None else (recipe.expect(), tensor.shape)

    @staticmethod
    def unpack_hook(kept: Any) -> Tensor:
        """A hook of autograd: the tensor again, recomputed if it was not kept."""
        if isinstance(kept, Tensor):
            return kept
        recipe, shape = kept
        return recipe.get().view(shape)


NO_RECOMPUTE = Recompute()
