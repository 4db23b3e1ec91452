"""Every number of stages gives the numbers of one rank, in float64 with clipping on."""

import pytest

from tests.support.configs import small_config
from tests.support.runs import assert_same_run, run
from tests.support.tiers import slow_params

TOLERANCE = 1e-9


@pytest.mark.parametrize(
    ("schedule", "optimizer", "correction"),
    slow_params(
        [
            ("1f1b", "adamw", "none"),
            ("1f1b", "muon", "none"),
            ("2bw", "adamw", "none"),
            ("2bw", "muon", "error_feedback"),
        ],
        kept=(0, 3),
    ),
)
def test_two_and_four_stages_equal_one(schedule, optimizer, correction):
    def numbers(stages):
        return run(
            small_config(
                optimizer,
                schedule__name=schedule,
                correction__name=correction,
                parallel__pipeline=stages,
                train__eval_interval=7,
            )
        )

    one = numbers(1)
    assert (one.column("grad_norm") > 0.5).any(), "clipping never acted"
    for stages in (2, 4):
        assert_same_run(one, numbers(stages), tolerance=TOLERANCE)


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("1f1b", 2), ("1f1b", 5), ("2bw", 3), ("2bw", 8)])
def test_any_number_of_microbatches(schedule, microbatches):
    """m below, at and above the number of stages, down to the least that 2bw can run with."""

    def numbers(stages):
        return run(
            small_config(
                "adamw",
                schedule__name=schedule,
                parallel__pipeline=stages,
                train__global_batch_size=2 * microbatches,
                train__steps=6,
            )
        )

    assert_same_run(numbers(1), numbers(4), tolerance=TOLERANCE)


def test_validation_does_not_depend_on_the_training_microbatches():
    """Its own count, padded sequences left out: 10 sequences in microbatches of 1, 2, 4 and 8."""
    losses = [
        run(small_config("sgd", train__micro_batch_size=size, train__steps=1, optimizer__lr=0.0)).val_loss
        for size in (1, 2, 4, 8)
    ]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs(steps):
    def numbers(stages):
        return run(small_config(parallel__pipeline=stages, train__steps=steps, train__warmup_steps=0))

    assert_same_run(numbers(1), numbers(2), tolerance=TOLERANCE)


def test_tied_embeddings_on_one_stage_train():
    rows = run(small_config(model__tie_embeddings=True, schedule__name="1f1b")).column("loss")
    assert rows[-1] < rows[0]


CORRECTIONS = {
    "none": {"name": "none"},
    "error_feedback": {"name": "error_feedback"},
    "taylor": {"name": "taylor", "strength": 100.0, "adaptive": False},
}


@pytest.mark.parametrize(
    ("stages", "schedule", "correction"),
    slow_params(
        [(p, *case) for p in (1, 2) for case in (("1f1b", "none"), ("2bw", "error_feedback"), ("2bw", "taylor"))],
        kept=(2, 4),
    ),
)
def test_evaluating_changes_no_weight(schedule, correction, stages):

    def weights(interval):
        config = small_config(
            schedule__name=schedule,
            correction=CORRECTIONS[correction],
            parallel__pipeline=stages,
            train__eval_interval=interval,
            train__dtype="float32",
        )
        return run(config)

    never, often = weights(None), weights(5)  # after 5, 10 and 12
    assert sum(row["kind"] == "val" for row in often.rows) == 3
    for name, weight in never.weights.items():
        assert (weight == often.weights[name]).all(), f"{name} depends on how often one evaluates"
    assert (never.column("loss") == often.column("loss")).all()
    assert never.val_loss == often.val_loss
