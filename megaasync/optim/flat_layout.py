"""Where each parameter lies in one flat buffer, so that a step is a few kernels and not a Python loop over tensors.

Parameters that share rule and decay lie together; matrices of equal shape lie together as a stack that one batched
Newton-Schulz takes. Gradients, master weights, updates and compute weights all use the same layout.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megaasync.optim.routing import Route, Shape
from megaasync.optim.update_rule import UpdateRule

ALIGNMENT = 64  # elements; keeps every group's start on a boundary that matmul kernels accept
_SCRATCH = 1 << 25  # elements that one part of a step takes; its scratch is up to five times that


@dataclass(frozen=True, slots=True)
class Group:
    """A run of the flat buffer that one rule takes at once.

    Attributes:
        start, end: elements.
        matrix_shape: (rows, cols) of the stacked matrices, or None for a flat run of elements.
    """

    rule: UpdateRule
    weight_decay: float
    start: int
    end: int
    matrix_shape: tuple[int, int] | None

    def view(self, flat: Tensor) -> Tensor:
        """[n, rows, cols] or [n], as the rule wants it."""
        run = flat[self.start : self.end]
        return run if self.matrix_shape is None else run.view(-1, *self.matrix_shape)

    def parts(self) -> Iterator[slice]:
        """Slices of the view's first dimension that a step takes one at a time, so that its scratch stays bounded."""
        row = 1 if self.matrix_shape is None else math.prod(self.matrix_shape)
        length, rows = (self.end - self.start) // row, max(_SCRATCH // row, 1)
        return (slice(at, min(at + rows, length)) for at in range(0, length, rows))


class FlatLayout:
    """The layout of one stage's parameters.

    Attributes:
        names: parameters in the order they were given.
        size: elements of the buffer, padding included.
        groups: runs of equal rule, decay and matrix shape.
    """

    def __init__(self, shapes: Mapping[str, Shape], routes: Mapping[str, Route]) -> None:
        self.names = tuple(shapes)
        self._shapes = dict(shapes)
        members: dict[tuple, list[str]] = {}
        for name, shape in shapes.items():
            route = routes[name]
            matrix_shape = (shape[-2], shape[-1]) if route.is_matrix_rule else None
            members.setdefault((route.rule, route.weight_decay, matrix_shape), []).append(name)
        self._starts: dict[str, int] = {}
        groups, at = [], 0
        for (rule, weight_decay, matrix_shape), names in members.items():
            start = at
            for name in names:
                self._starts[name] = at
                at += math.prod(shapes[name])
            groups.append(Group(rule, weight_decay, start, at, matrix_shape))
            at = -(-at // ALIGNMENT) * ALIGNMENT
        self.groups, self.size = tuple(groups), at

    def place_of(self, name: str) -> slice:
        """Where a parameter lies in the flat buffer."""
        start = self._starts[name]
        return slice(start, start + math.prod(self._shapes[name]))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat buffer, shaped, in the order of `names`."""
        return [flat[self.place_of(name)].view(shape) for name, shape in self._shapes.items()]
