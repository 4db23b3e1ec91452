"""2bw equals a delayed loop written by hand, and the comparison notices deliberate faults."""

import numpy as np
import pytest

from tests.parity.reference import largest_gap, learning_rate, reference_run, validation_loss
from tests.support.configs import small_config
from tests.support.runs import run

TOLERANCE = 1e-9
CASES = [(o, c) for o in ("sgd", "adamw", "muon") for c in ("none", "error_feedback")]


@pytest.mark.parametrize(("optimizer", "correction"), CASES)
def test_2bw_equals_the_hand_written_loop(optimizer, correction):
    config = small_config(optimizer, correction__name=correction, parallel__pipeline=2)
    numbers = run(config)
    by_hand = reference_run(config, delay=1)
    np.testing.assert_allclose(numbers.column("loss"), by_hand.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(numbers.column("grad_norm"), by_hand.norms, rtol=TOLERANCE)
    rates = [learning_rate(step, config) for step in range(config.train.steps)]
    np.testing.assert_allclose(numbers.column("lr"), rates, rtol=TOLERANCE)
    assert largest_gap(numbers.weights, by_hand.weights) < TOLERANCE
    assert max(by_hand.norms) > config.train.clip_grad_norm, "clipping never acted"


def test_evaluations_are_of_the_newest_z_and_the_published_x():
    """After N steps N-1 gradients are applied, at the end all of them; 10 sequences in microbatches of 4, padded."""
    config = small_config(
        "adamw",
        correction__name="error_feedback",
        parallel__pipeline=2,
        train__steps=7,
        train__eval_interval=3,
        train__micro_batch_size=4,
    )
    by_hand = reference_run(config, delay=1)
    rows = [row for row in run(config).rows if row["kind"] == "val"]
    assert [row["step"] for row in rows] == [3, 6, 7]
    for row, updates in zip(rows, (2, 5, 7), strict=True):
        assert row["loss"] == pytest.approx(validation_loss(by_hand, by_hand.z[updates], config), rel=TOLERANCE)
        assert row["loss_x"] == pytest.approx(validation_loss(by_hand, by_hand.x[updates], config), rel=TOLERANCE)
        assert row["loss"] != row["loss_x"]


@pytest.mark.parametrize("clip", [None, 1e3])
def test_no_clipping_and_a_bound_above_every_norm_leave_gradients_as_they_are(clip):
    config = small_config("sgd", train__clip_grad_norm=clip, train__steps=10, optimizer__lr=0.1)
    numbers, by_hand = run(config), reference_run(small_config("sgd", train__clip_grad_norm=None, train__steps=10,
                                                               optimizer__lr=0.1), delay=1)  # fmt: skip
    assert clip is None or (numbers.column("grad_norm") < clip).all()
    assert largest_gap(numbers.weights, by_hand.weights) < TOLERANCE


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_1f1b_equals_the_loop_without_delay(optimizer):
    config = small_config(optimizer, schedule__name="1f1b", parallel__pipeline=2)
    numbers = run(config)
    by_hand = reference_run(config, delay=0)
    np.testing.assert_allclose(numbers.column("loss"), by_hand.losses, rtol=TOLERANCE)
    assert largest_gap(numbers.weights, by_hand.weights) < TOLERANCE


@pytest.mark.slow("engine")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_deliberate_faults_are_noticed(optimizer):
    """Each fault moves the weights by far more than the tolerance of the tests above."""
    config = small_config(optimizer, correction__name="error_feedback", parallel__pipeline=2)
    weights = run(config).weights
    faults = {
        "delay 0": reference_run(config, delay=0),
        "delay 2": reference_run(config, delay=2),
        **{
            fault: reference_run(config, delay=1, fault=fault)
            for fault in ("clip per stage", "decay at x", "no settling")
        },
    }
    for fault, wrong in faults.items():
        assert largest_gap(weights, wrong.weights) > 1000 * TOLERANCE, f"the comparison does not notice: {fault}"
