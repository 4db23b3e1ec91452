"""Gradient sums, one flat buffer per step in flight: two steps never share one, whatever version they ran on.

Batches 0 and 1 both run on version 0, so gradients are kept by step and not by weight slot. They are accumulated in
place in at least float32.
"""

import torch
from torch import Tensor, nn

from megaasync.optim.flat_param_layout import FlatParamLayout


class GradientBuffers:
    """The gradient sums of one stage; step t is in buffer t mod num_buffers."""

    def __init__(
        self, modules: list[nn.Module], layout: FlatParamLayout, *, num_buffers: int, dtype: torch.dtype
    ) -> None:
        sample = next(modules[0].parameters())
        self._buffers = [torch.zeros(layout.size, dtype=dtype, device=sample.device) for _ in range(num_buffers)]
        self._views = [layout.views(buffer) for buffer in self._buffers]
        self._accumulates_in_grad = sample.dtype is dtype
        self._current: list[Tensor] = self._views[0]
        self._steps: list[int | None] = [None] * num_buffers
        # not the module itself: its parameters' hooks hold this object, and python cannot see that circle to free it
        self._attached: tuple[int, int] | None = None
        if not self._accumulates_in_grad:
            for module in modules:
                for index, parameter in enumerate(module.parameters()):
                    parameter.register_post_accumulate_grad_hook(self._adder(index))

    def _adder(self, index: int):  # noqa: ANN202 - a torch hook
        def add(parameter: Tensor) -> None:
            if parameter.grad is None:  # a kernel has added it already, or leaves it for later
                return
            self._current[index].add_(parameter.grad)
            parameter.grad = None

        return add

    def attach(self, module: nn.Module, step: int) -> None:
        """Make the backwards of `module` add to the sum of `step`; the first call for a step zeroes the sum."""
        if self._attached == (id(module), step):
            return
        slot = step % len(self._buffers)
        self._attached = (id(module), step)
        if self._steps[slot] != step:
            self._steps[slot] = step
            self._buffers[slot].zero_()
        self._current = self._views[slot]
        for parameter, view in zip(module.parameters(), self._current, strict=True):
            parameter.main_grad = view  # where kernels add to
            if self._accumulates_in_grad:
                parameter.grad = view

    def sum_of(self, step: int) -> Tensor:
        """[layout.size] gradient sum of `step`."""
        return self._buffers[step % len(self._buffers)]
