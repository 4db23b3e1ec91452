"""Any `torch.optim.Optimizer` as an update rule, at the price of one copy of the parameters.

Zero anchor (docs/method.md): the optimizer steps a tensor of zeros with lr 1 and no weight decay, so what it
moves is minus the direction. Where its step depends on the weights or not linearly on the lr, as Adafactor's does, it
steps a copy of z with the real lr, and the direction is the difference. Which of the two is found out by a trial.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaasync.fields import ConfigError
from megaasync.update_rules.update_rule import State

_OF_KERNELS = ("fused", "capturable")  # arguments that say how, for GPUs, and not what: trials are on a CPU, without
_TRIAL = {1: (5,), 2: (5, 7)}  # shapes for trials; no two sides alike, so that a state's sides can be told


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor that the optimizer keeps for each parameter: its sides as positions in the parameter's shape or 1."""

    name: str
    sides: tuple[int | None, ...]

    def shape(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(1 if side is None else parameter[side] for side in self.sides)


@dataclass(frozen=True, slots=True)
class _Anatomy:
    """What the optimizer keeps.

    Attributes:
        slots: per parameter.
        counters: per parameter, numbers that count its steps.
        group_counters: the same in the parameter group.
        sees_weights: its step depends on the weights, or not linearly on the lr.
    """

    slots: tuple[_Slot, ...]
    counters: tuple[str, ...]
    group_counters: tuple[str, ...]
    sees_weights: bool


@dataclass(frozen=True, slots=True)
class TorchOptimizer:
    """A rule made of an optimizer class; of a stack of matrices [n, rows, cols] each is one parameter of it.

    Attributes:
        factory: the class.
        arguments: of its construction, without lr and weight decay.
        anatomy: what it keeps.
        is_matrix_rule: parameters are matrices; otherwise flat runs, of which elementwise optimizers alone are right.
    """

    factory: type[torch.optim.Optimizer]
    arguments: tuple[tuple[str, Any], ...]
    anatomy: _Anatomy
    is_matrix_rule: bool

    @property
    def sees_weights(self) -> bool:
        """Whether `direction` needs z and the lr."""
        return self.anatomy.sees_weights

    def init(self, like: Tensor) -> State:
        """Zeros; the optimizer sets its own initial values with the first gradient."""
        stack, shape = (like.shape[:-2], like.shape[-2:]) if self.is_matrix_rule else ((), like.shape)
        return {slot.name: like.new_zeros((*stack, *slot.shape(shape))) for slot in self.anatomy.slots}

    def direction(
        self, grad: Tensor, state: State, *, count: int, weights: Tensor | None = None, lr: float = 1.0
    ) -> Tensor:
        """What the optimizer would subtract, over lr.

        Args:
            grad: the gradient, scaled and clipped.
            state: from `init`.
            count: gradients absorbed by then, this one included; from 1.
            weights: z, if `sees_weights`; not written to.
            lr: if `sees_weights`, above 0.
        """
        if self.sees_weights and weights is None:
            raise TypeError(f"{self.factory.__name__}: its direction depends on the weights; give them")
        before, lr = (weights, lr) if self.sees_weights else (torch.zeros_like(grad), 1.0)
        assert before is not None
        moved = before.clone()
        if moved.numel() == 0:
            return moved
        given = grad.clone()  # some optimizers write into it
        parts = list(zip(moved, given, strict=True)) if self.is_matrix_rule else [(moved, given)]
        parameters = [torch.nn.Parameter(part, requires_grad=False) for part, _ in parts]
        for parameter, (_, gradient) in zip(parameters, parts, strict=True):
            parameter.grad = gradient
        optimizer = make_optimizer(self.factory, dict(self.arguments), parameters, lr=lr)
        if count > 1:
            self._put_in(optimizer, parameters, state, count)
        optimizer.step()
        self._take_out(optimizer, parameters, state)
        return before.sub(moved).div_(lr) if self.sees_weights else moved.neg_()

    def _views(self, state: State, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] if self.is_matrix_rule else tensor for name, tensor in state.items()}

    def _put_in(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], state: State, count: int
    ) -> None:
        for name in self.anatomy.group_counters:
            optimizer.param_groups[0][name] = count - 1
        for index, parameter in enumerate(parameters):
            # kernels that read the count themselves want it where the parameter is
            device = parameter.device if any(optimizer.defaults.get(name) for name in _OF_KERNELS) else "cpu"
            counters = {
                name: torch.tensor(float(count - 1), dtype=torch.float32, device=device)
                for name in self.anatomy.counters
            }
            optimizer.state[parameter] = {**self._views(state, index), **counters}

    def _take_out(self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], state: State) -> None:
        for index, parameter in enumerate(parameters):
            for name, view in self._views(state, index).items():
                kept = optimizer.state[parameter][name]
                if kept.data_ptr() != view.data_ptr():
                    view.copy_(kept)


def make_optimizer(
    factory: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    parameters: list[torch.nn.Parameter],
    *,
    lr: float,
) -> torch.optim.Optimizer:
    """An optimizer of the class without weight decay: that is ours to add."""
    given = {**arguments, "lr": lr}
    if "weight_decay" in inspect.signature(factory).parameters:
        given["weight_decay"] = 0.0
    return factory(parameters, **given)


def find_optimizer(target: str) -> type[torch.optim.Optimizer]:
    """The class of that name.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError as error:
        raise ConfigError(f"optimizer.target={target}: {error}; install it or correct the name") from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.target={target}: not the name of a torch.optim.Optimizer, as torch.optim.RMSprop")
    return found


def torch_optimizer_rule(target: str, arguments: Mapping[str, Any], *, is_matrix_rule: bool) -> TorchOptimizer:
    """The rule of a class by its name.

    Raises:
        ConfigError: no such class, wrong arguments, or it keeps what cannot be split by parameters.
    """
    factory = find_optimizer(target)
    for name, ours in (("lr", "optimizer.lr"), ("weight_decay", "optimizer.weight_decay (decoupled)")):
        if name in arguments:
            raise ConfigError(f"optimizer.arguments.{name}={arguments[name]}: set {ours}")
    for name in _OF_KERNELS:
        if name in arguments and name not in inspect.signature(factory).parameters:
            raise ConfigError(f"optimizer.arguments.{name}={arguments[name]}: {target} takes no {name}; leave it out")
    tried = {name: value for name, value in arguments.items() if name not in _OF_KERNELS}
    try:
        anatomy = _anatomy(factory, tried, target, shape=_TRIAL[2 if is_matrix_rule else 1])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"optimizer.target={target}: a trial with optimizer.arguments={dict(arguments)} failed: {error}"
        ) from None
    # lists as tuples: rules are compared and looked up
    fixed = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in sorted(arguments.items()))
    return TorchOptimizer(factory, fixed, anatomy, is_matrix_rule)


def _trial(
    factory: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    shape: tuple[int, ...],
    start: float,
    lr: float,
    *,
    part: slice = slice(None),
) -> tuple[Tensor, torch.optim.Optimizer, torch.nn.Parameter]:
    """What three steps move, over lr; of a part of the parameter if it is there alone."""
    generator = torch.Generator().manual_seed(0)
    weights = start * torch.randn(shape, generator=generator, dtype=torch.float64)[part]
    parameter = torch.nn.Parameter(weights.clone(), requires_grad=False)
    optimizer = make_optimizer(factory, arguments, [parameter], lr=lr)
    for _ in range(3):
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)[part].clone()
        optimizer.step()
    return (parameter.detach() - weights) / lr, optimizer, parameter


def _anatomy(
    factory: type[torch.optim.Optimizer], arguments: Mapping[str, Any], target: str, *, shape: tuple[int, ...]
) -> _Anatomy:
    moved, optimizer, parameter = _trial(factory, arguments, shape, 0.0, 1.0)
    others = [_trial(factory, arguments, shape, start, lr)[0] for start, lr in ((1.0, 1.0), (0.0, 0.5))]
    sees_weights = any((moved - other).norm() > 1e-3 * moved.norm() for other in others)
    slots, counters = [], []
    for name, value in optimizer.state[parameter].items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if not all(side in (1, *shape) for side in value.shape) or value.dim() > len(shape):
                raise ConfigError(
                    f"optimizer.target={target}: keeps {name!r} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{shape}; only states shaped by the parameter can be split and saved"
                )
            slots.append(_Slot(name, tuple(None if side == 1 else shape.index(side) for side in value.shape)))
        elif isinstance(value, Tensor | int | float) and float(value) == 3:
            counters.append(name)
        elif value is not None:
            raise ConfigError(
                f"optimizer.target={target}: keeps {name!r}={value!r}, which is neither a tensor shaped by the "
                "parameter nor a count of its steps; take an optimizer of ours or another class"
            )
    fresh = make_optimizer(factory, arguments, [torch.nn.Parameter(torch.zeros(shape))], lr=1.0).param_groups[0]
    changed = {
        name: value
        for name, value in optimizer.param_groups[0].items()
        if name != "params" and (name not in fresh or fresh[name] != value)
    }
    for name, value in changed.items():
        if value != 3:
            raise ConfigError(
                f"optimizer.target={target}: changes its setting {name!r} as it goes (to {value!r}); only counts of "
                "steps can be kept"
            )
    is_elementwise = not any(not slot.sides or slot.sides[0] is None for slot in slots)
    if len(shape) == 1 and is_elementwise:  # a norm or mean over the parameter shows when the parts are there alone
        middle = shape[0] // 2
        halves = [
            _trial(factory, arguments, shape, start, 1.0, part=part)[0]
            for start in (0.0, 1.0)
            for part in (slice(0, middle), slice(middle, None))
        ]
        whole = [moved, others[0]]
        is_elementwise = all(
            torch.allclose(torch.cat(halves[2 * i : 2 * i + 2]), item, rtol=1e-9, atol=1e-12)
            for i, item in enumerate(whole)
        )
    if len(shape) == 1 and not is_elementwise:
        raise ConfigError(f"optimizer.target={target}: is not elementwise; set optimizer.elementwise=false")
    return _Anatomy(tuple(slots), tuple(counters), tuple(changed), sees_weights)
