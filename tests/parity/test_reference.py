"""2bw equals a delayed loop written by hand, and the comparison notices deliberate faults."""

import numpy as np
import pytest

from tests.parity.reference import largest_gap, reference_run
from tests.support.configs import small_config
from tests.support.runs import run

TOLERANCE = 1e-9
CASES = [(o, c) for o in ("sgd", "adamw", "muon") for c in ("none", "error_feedback")]


@pytest.mark.parametrize(("optimizer", "correction"), CASES)
def test_2bw_equals_the_hand_written_loop(optimizer, correction):
    config = small_config(optimizer, correction__name=correction, parallel__pipeline=2)
    numbers = run(config)
    losses, norms, weights = reference_run(config, delay=1)
    np.testing.assert_allclose(numbers.column("loss"), losses, rtol=TOLERANCE)
    np.testing.assert_allclose(numbers.column("grad_norm"), norms, rtol=TOLERANCE)
    assert largest_gap(numbers.weights, weights) < TOLERANCE
    assert max(norms) > config.train.clip_grad_norm, "clipping never acted"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_1f1b_equals_the_loop_without_delay(optimizer):
    config = small_config(optimizer, schedule__name="1f1b", parallel__pipeline=2)
    numbers = run(config)
    losses, _, weights = reference_run(config, delay=0)
    np.testing.assert_allclose(numbers.column("loss"), losses, rtol=TOLERANCE)
    assert largest_gap(numbers.weights, weights) < TOLERANCE


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
    for fault, (_, _, wrong) in faults.items():
        assert largest_gap(weights, wrong) > 1000 * TOLERANCE, f"the comparison does not notice: {fault}"
