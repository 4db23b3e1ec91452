"""The closed forms of docs/method.md for a quadratic, out of the real executor on one rank with optimizer=sgd."""

import math

import numpy as np
import pytest
import torch

from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import Role, Route
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.update_rules.kinds.sgd import Sgd, SgdConfig
from tools.study.problems import Problem, Setting, solve

MODES = {"sync": (0, False), "delayed": (1, False), "error feedback": (1, True)}


class Quadratic(Problem):
    def loss(self, weight, step):
        return 0.5 * weight.square().sum()


def sizes(a, mode, *, steps, momentum=0.0):
    """|x| by step for lr times curvature `a`."""
    delay, corrected = MODES[mode]
    setting = Setting(SgdConfig("sgd", 0.0, 0.0, momentum), delay, corrected, lr=a, steps=steps)
    return np.sqrt([2 * visit.loss for visit in solve(Quadratic(torch.ones(1, dtype=torch.float64)), setting)])


def dominant_root(a, mode):
    """Of r - 1 + a, r^2 - r + a, r^3 - r^2 + 2 a r - a."""
    polynomial = {"sync": [1, a - 1], "delayed": [1, -1, a], "error feedback": [1, -1, 2 * a, -a]}[mode]
    return max(np.roots(polynomial), key=abs)


def fitted_root(a, mode):
    size = sizes(a, mode, steps=200)
    return (size[-1] / size[-101]) ** (1 / 100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("a", [0.02, 0.1])
def test_decay_rates_are_the_roots(a, mode):
    root = dominant_root(a, mode)
    assert abs(root.imag) < 1e-12
    assert math.log(fitted_root(a, mode)) == pytest.approx(math.log(root.real), rel=1e-6)


def test_the_delay_costs_a_squared_and_error_feedback_a_cubed():
    a = 0.01
    assert fitted_root(a, "delayed") - (1 - a) == pytest.approx(-(a**2), rel=0.03)  # -1.02 a^2
    assert fitted_root(a, "error feedback") - (1 - a) == pytest.approx(a**3, rel=0.03)


# largest stable a, by momentum (Nesterov's form, a moving average)
LIMITS = {
    0.0: {"sync": 2.0, "delayed": 1.0, "error feedback": (math.sqrt(5) - 1) / 2},
    0.9: {"sync": 13.6, "delayed": 2.54, "error feedback": 3.46},
    0.95: {"sync": 26.9, "delayed": 3.75, "error feedback": 6.79},
    0.99: {"sync": 134.0, "delayed": 9.14, "error feedback": 33.5},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "momentum", [0.0, 0.9, *(pytest.param(mu, marks=pytest.mark.slow("study")) for mu in (0.95, 0.99))]
)
def test_stability_limits(momentum, mode):
    """Within 2 %: below, the size shrinks; above, it grows."""
    limit = LIMITS[momentum][mode]
    steps = 300 if momentum == 0 else 800 if momentum < 0.95 else 4000
    for factor, grows in ((0.98, False), (1.02, True)):
        size = sizes(factor * limit, mode, steps=steps, momentum=momentum)
        early, late = size[steps // 3 : 2 * steps // 3].max(), size[2 * steps // 3 :].max()
        assert (late > early) == grows, (factor, early, late)


def test_error_feedback_shrinks_the_limit_without_momentum_and_widens_it_with_much():
    without, with_much = LIMITS[0.0], LIMITS[0.99]
    assert without["error feedback"] < without["delayed"] and with_much["error feedback"] > with_much["delayed"]


@pytest.mark.slow("study")
def test_rounding_does_not_pile_up_over_20000_steps():
    """Error feedback's x = z - u in float32 against float64, same gradients: off by a rounding of z, always.

    z itself is off as any float32 master is, by a random walk of roundings.
    """
    size, generator = 256, torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator)
    layout = FlatParamLayout({"w": (size,)}, {"w": Route(Role.VECTOR, Sgd(), 0.0, False)})
    dtypes, published = (torch.float32, torch.float64), {}
    optimizers = {d: StageOptimizer(layout, [start], dtype=d, learning_rate=lambda k: 1e-4) for d in dtypes}
    off = {}
    for step in range(1, 20_001):
        gradient = torch.randn(layout.size, generator=generator)
        for dtype, optimizer in optimizers.items():
            published[dtype] = torch.zeros(layout.size, dtype=dtype)
            optimizer.step(gradient.to(dtype, copy=True), scale=1.0, out=published[dtype], lookahead_steps=1)
        if step in (100, 20_000):
            moves = [optimizers[d].master.double() - published[d].double() for d in dtypes]
            off[step] = (moves[0] - moves[1]).square().mean().sqrt().item()
    eps = torch.finfo(torch.float32).eps
    assert off[100] < 0.3 * eps and off[20_000] < 1.2 * off[100]
    walk = (optimizers[torch.float32].master.double() - optimizers[torch.float64].master).square().mean().sqrt()
    assert walk < 0.3 * eps * math.sqrt(20_000)
