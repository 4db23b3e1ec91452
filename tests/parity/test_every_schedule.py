"""Every schedule in float64: synchronous ones equal one rank, the others a hand-written loop with their delays."""

import functools
from contextlib import suppress

import numpy as np
import pytest

from megaasync.schedules import SCHEDULES, ScheduleError, build_schedule
from tests.parity.reference import Reference, largest_gap, reference_run
from tests.support.configs import small_config
from tests.support.runs import RunNumbers, assert_same_run, run
from tests.support.tiers import slow_params

TOLERANCE = 1e-9


def config_of(schedule, stages, microbatches, optimizer="adamw", layers=None, **overrides):
    virtual_stages = overrides.get("parallel__virtual_stages", SCHEDULES[schedule].virtual_stages[0])
    settings = {
        "schedule__name": schedule,
        "parallel__pipeline": stages,
        "model__num_layers": layers or max(stages * virtual_stages, 4),
        "train__micro_batch_size": 1,
        "train__global_batch_size": microbatches,
        "train__steps": 5,
        "train__clip_grad_norm": 0.3,
        "train__warmup_steps": 2,
    }
    return small_config(optimizer, **{**settings, **overrides})


@functools.cache
def one_rank(layers, microbatches, optimizer):
    return run(config_of("1f1b", 1, microbatches, optimizer, layers=layers))


def assert_equals_one_rank(config) -> None:
    one = one_rank(config.model.num_layers, config.num_microbatches, config.optimizer.name)
    assert_same_run(one, run(config), tolerance=TOLERANCE)


def assert_equals_the_loop(numbers: RunNumbers, by_hand: Reference, config) -> None:
    np.testing.assert_allclose(numbers.column("loss"), by_hand.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(numbers.column("grad_norm"), by_hand.norms, rtol=TOLERANCE)
    assert largest_gap(numbers.weights, by_hand.weights) < TOLERANCE
    assert max(by_hand.norms) > config.train.clip_grad_norm, "clipping never acted"


def smallest_microbatches(schedule, stages):
    """The fewest that the schedule is defined for, from 3 down and up: 1 hides faults in what microbatches share."""
    for m in (3, 2, 4, 1):
        with suppress(ScheduleError):
            return m, build_schedule(schedule, num_ranks=stages, num_microbatches=m)
    raise AssertionError(f"{schedule} is not defined for P = {stages} and m = 1, 2, 3 or 4")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_the_loop_with_the_delays_of_its_table(schedule):
    """A new one included; what its delays must be is said in tests/schedules/kinds."""
    m, table = smallest_microbatches(schedule, 2)
    correction = "error_feedback" if SCHEDULES[schedule].has_delay else "none"
    config = config_of(schedule, 2, m, "muon", correction__name=correction, train__steps=6)
    by_hand = reference_run(config, delay=list(table.delay), clips_by_stage=table.clip == "stage")
    assert_equals_the_loop(run(config), by_hand, config)


SYNCHRONOUS = [
    *[(name, p, m) for name in ("gpipe", "zb_h1") for p, m in ((1, 2), (2, 1), (2, 3), (4, 2), (4, 6))],
    *[("interleaved_1f1b", p, m) for p, m in ((1, 3), (2, 2), (2, 4), (4, 4))],
    *[("zbv", p, m) for p, m in ((1, 3), (2, 1), (2, 3), (4, 5))],
    ("1f1b", 4, 3),
]


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), slow_params(SYNCHRONOUS, kept=(9, 13)))
def test_synchronous_schedules_equal_one_rank(schedule, stages, microbatches):
    optimizer = "muon" if stages == 2 else "adamw"
    assert_equals_one_rank(config_of(schedule, stages, microbatches, optimizer))


def test_three_chunks_and_more_in_flight():
    assert_equals_one_rank(config_of("interleaved_1f1b", 2, 4, parallel__virtual_stages=3, schedule__extra_in_flight=1))


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize(
    ("stages", "microbatches", "optimizer", "extra"),
    slow_params([(1, 3, "adamw", 0), (2, 2, "muon", 0), (2, 6, "adamw", 1), (4, 4, "adamw", 0)], kept=(1, 2)),
)
def test_interleaved_2bw_equals_the_loop(stages, microbatches, optimizer, extra, correction):
    config = config_of(
        "interleaved_2bw",
        stages,
        microbatches,
        optimizer,
        correction__name=correction,
        schedule__extra_in_flight=extra,
    )
    assert_equals_the_loop(run(config), reference_run(config, delay=1), config)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 6)])
def test_2bw_with_more_in_flight_equals_the_loop(stages, microbatches):
    config = config_of("2bw", stages, microbatches, schedule__extra_in_flight=1)
    assert_equals_the_loop(run(config), reference_run(config, delay=1), config)


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize(
    ("stages", "optimizer"), slow_params([(1, "muon"), (2, "muon"), (2, "adamw"), (4, "adamw")], kept=(1, 3))
)
def test_pipedream_equals_the_loop(stages, correction, optimizer):
    """Stage s is P-1-s updates behind and clips by its own norm; error feedback looks as far ahead."""
    config = config_of("pipedream", stages, 1, optimizer, correction__name=correction, train__steps=12)
    delays = [stages - 1 - stage for stage in range(stages)]
    assert_equals_the_loop(run(config), reference_run(config, delay=delays, clips_by_stage=True), config)


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize(
    ("stages", "microbatches", "optimizer"),
    slow_params([(1, 2, "adamw"), (2, 1, "muon"), (2, 3, "adamw"), (4, 2, "adamw")], kept=(1, 2)),
)
def test_wpipe_equals_the_loop(stages, microbatches, optimizer, correction):
    """The first half of the stages is one update behind, the second half none."""
    config = config_of("wpipe", stages, microbatches, optimizer, correction__name=correction)
    delays = [1] * stages + [0] * stages
    assert_equals_the_loop(run(config), reference_run(config, delay=delays), config)


@pytest.mark.parametrize(
    ("schedule", "delay", "optimizer", "correction"),
    [
        ("2bw", [3], "muon", "error_feedback"),
        ("interleaved_2bw", [3, 2, 1, 0], "adamw", "error_feedback"),
        ("interleaved_2bw", [3, 2, 1, 0], "muon", "taylor"),
        pytest.param("interleaved_2bw", [1, 4], "muon", "none", marks=pytest.mark.slow("engine")),
    ],
)
def test_a_given_delay_vector_equals_the_loop(schedule, delay, optimizer, correction):
    """For studies on one rank; clipped by the global norm whatever the delays."""
    config = config_of(
        schedule, 1, 2, optimizer, parallel__virtual_stages=len(delay), schedule__delay=delay, train__steps=10,
        correction__name=correction,
        **({"correction__strength": 0.5, "correction__adaptive": False} if correction == "taylor" else {}),
    )  # fmt: skip
    assert_equals_the_loop(run(config), reference_run(config, delay=delay), config)


def test_a_wrong_delay_vector_is_noticed():
    pipedream, wpipe = config_of("pipedream", 4, 1, train__steps=12), config_of("wpipe", 2, 2)
    wrong = {
        "pipedream with 2bw's delay": (pipedream, {"delay": 1}),
        "pipedream clipped globally": (pipedream, {"delay": [3, 2, 1, 0]}),
        "pipedream one update fresher": (pipedream, {"delay": [2, 1, 0, 0], "clips_by_stage": True}),
        "wpipe with its groups exchanged": (wpipe, {"delay": [0, 0, 1, 1]}),
        "wpipe as 2bw": (wpipe, {"delay": 1}),
    }
    weights = {config: run(config).weights for config in (pipedream, wpipe)}
    for mistake, (config, arguments) in wrong.items():
        gap = largest_gap(weights[config], reference_run(config, **arguments).weights)
        assert gap > 1000 * TOLERANCE, f"the comparison does not notice: {mistake}"


TIED = [
    ("1f1b", 2, 2, 0),
    ("gpipe", 4, 2, 0),
    ("zb_h1", 2, 3, 0),
    ("interleaved_1f1b", 2, 2, 0),
    ("zbv", 2, 2, 0),
    ("2bw", 1, 2, 1),
    ("2bw", 2, 2, 1),
    ("2bw", 4, 5, 1),
    ("interleaved_2bw", 2, 2, 1),
    ("interleaved_2bw", 1, 2, 1),
]


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "delay", "overlap"),
    slow_params(
        [*((*case, True) for case in TIED), *((*TIED[number], False) for number in (0, 4, 6, 8))],
        kept=(0, 4, 6, 8, 12),
    ),
)
def test_tied_embeddings_equal_the_loop(schedule, stages, microbatches, delay, overlap):
    """Both copies get the sum of both gradients, which counts once in the norm; asynchronous schedules included."""
    config = config_of(
        schedule,
        stages,
        microbatches,
        model__tie_embeddings=True,
        correction__name="error_feedback" if delay else "none",
        schedule__overlap_step=overlap,
    )
    assert_equals_the_loop(run(config), reference_run(config, delay=delay), config)


def test_tied_embeddings_under_wpipe_equal_the_loop():
    """The copies run on different versions: the first stage's is one update behind, the last stage's is not."""
    config = config_of("wpipe", 2, 2, model__tie_embeddings=True)
    assert_equals_the_loop(run(config), reference_run(config, delay=[1, 1, 0, 0], head_delay=0), config)


PHASES = {"schedule__sync_start_steps": 5, "schedule__sync_cooldown_steps": 5, "train__steps": 20}


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "optimizer", "delay"),
    slow_params(
        [
            ("2bw", 1, 2, "adamw", 1),
            ("2bw", 2, 2, "muon", 1),
            ("2bw", 2, 2, "adamw", 1),
            ("interleaved_2bw", 2, 2, "muon", 1),
            ("pipedream", 3, 1, "adamw", [2, 1, 0]),
            ("wpipe", 2, 2, "adamw", [1, 1, 0, 0]),
        ],
        kept=(1,),
    ),
)
def test_phases_equal_the_loop(schedule, stages, microbatches, optimizer, delay, correction):
    """Synchronous start, asynchronous middle, synchronous cooldown; evaluating in between changes nothing."""
    config = config_of(
        schedule,
        stages,
        microbatches,
        optimizer,
        correction__name=correction,
        train__eval_interval=4,
        # a synchronous phase clips by the global norm, pipedream's does not: the loop has one rule
        train__clip_grad_norm=None if schedule == "pipedream" else 0.3,
        **PHASES,
    )
    numbers, by_hand = run(config), reference_run(config, delay=delay)
    np.testing.assert_allclose(numbers.column("loss"), by_hand.losses, rtol=TOLERANCE)
    np.testing.assert_allclose(numbers.column("grad_norm"), by_hand.norms, rtol=TOLERANCE)
    assert largest_gap(numbers.weights, by_hand.weights) < TOLERANCE
    most = max(delay) if isinstance(delay, list) else delay
    ramp = [min(k, most) for k in range(10)]
    assert numbers.column("staleness").tolist() == [0] * 5 + ramp + [0] * 5


def test_other_phases_are_noticed():
    weights = run(config_of("2bw", 1, 2, **PHASES)).weights
    for other in (
        {"schedule__sync_start_steps": 0, "schedule__sync_cooldown_steps": 0},
        {"schedule__sync_start_steps": 4},
        {"schedule__sync_cooldown_steps": 4},
    ):
        config = config_of("2bw", 1, 2, **{**PHASES, **other})
        assert largest_gap(weights, reference_run(config, delay=1).weights) > 1000 * TOLERANCE


@pytest.mark.parametrize("schedule", slow_params(["2bw", "interleaved_2bw", "1f1b", "wpipe"], kept=(0,)))
def test_the_hidden_step_has_the_bits_of_the_exposed_one(schedule):
    def numbers(overlap):
        config = config_of(
            schedule,
            2,
            4,
            "muon",
            correction__name="none" if schedule == "1f1b" else "error_feedback",
            schedule__overlap_step=overlap,
            train__dtype="float32",
            train__steps=10,
            train__eval_interval=3,
        )
        return run(config)

    hidden, exposed = numbers(True), numbers(False)
    for name, weight in hidden.weights.items():
        assert (weight == exposed.weights[name]).all(), name
    for name in ("loss", "grad_norm"):
        assert (hidden.column(name) == exposed.column(name)).all()


def test_uneven_layers():
    assert_equals_one_rank(config_of("1f1b", 4, 2, layers=8, parallel__layers_per_stage=[1, 4, 2, 1]))
