"""Shapes of the learning rate, edges included."""

import pytest

from megaasync.optim.lr_schedule import LearningRate, LrShape, lr_multiplier
from tests.support.configs import small_config


def curve(**overrides):
    config = small_config(**{f"train__{k}": v for k, v in overrides.items()}).train
    return [lr_multiplier(LrShape.of(config), k) for k in range(config.steps)]


def test_warmup_is_linear_and_reaches_the_peak():
    assert curve(steps=10, warmup_steps=4, lr_schedule="constant") == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]


def test_cosine_goes_from_peak_to_the_final_ratio():
    values = curve(steps=101, warmup_steps=0, lr_schedule="cosine", final_lr_ratio=0.1)
    assert values[0] == 1
    assert values[50] == pytest.approx(0.55)
    assert values[-1] == pytest.approx(0.1)
    assert values == sorted(values, reverse=True)


def test_wsd_is_flat_then_linear():
    values = curve(steps=20, warmup_steps=2, lr_schedule="wsd", decay_steps=5, final_lr_ratio=0.0)
    assert values[1:15] == [1.0] * 14
    assert values[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 25])
@pytest.mark.parametrize("decay", [0, 1, 10, 25])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_no_edge_divides_by_zero(kind, warmup, decay, steps):
    values = curve(steps=steps, warmup_steps=warmup, decay_steps=decay, lr_schedule=kind)
    assert all(0 <= v <= 1 for v in values)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_a_schedule_over_fewer_steps_than_the_run_stays_at_its_end(kind):
    short = curve(steps=20, warmup_steps=3, lr_schedule=kind)
    longer = curve(steps=35, warmup_steps=3, lr_schedule=kind, lr_schedule_steps=20)
    assert longer[:20] == short and longer[20:] == [short[-1]] * 15
    assert curve(steps=35, warmup_steps=3, lr_schedule=kind)[:20] != short


def test_the_peak_is_used_twice_where_warmup_meets_cosine():
    values = curve(steps=20, warmup_steps=4, lr_schedule="cosine")
    assert values[3] == values[4] == 1 > values[5]


def test_pending_updates_keep_the_rate_of_their_rows():
    old = LearningRate(LrShape("cosine", 40, 0, 0.1, 0), peak=0.01)
    new = LearningRate(LrShape("cosine", 80, 0, 0.1, 0), peak=0.02)
    expected = [old(39), new(40)]
    new.keep_before(40, old)
    assert [new(39), new(40)] == expected and old(39) == pytest.approx(0.001)
