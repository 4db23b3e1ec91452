"""Every layout over {tensor, expert, pipeline, data} gives the numbers of one rank, in float64 with clipping on.

Vocabulary and number of matrices divide by nothing; all that balances the experts is on, and so are the norms of
queries and keys, which all heads share though tensor-parallel ranks have some of them each.
"""

import dataclasses
import itertools
from functools import lru_cache

import pytest

from megaasync.config import Config
from megaasync.config.parallel_dims import AXES, ParallelDims
from megaasync.config.schema import NoCorrection
from tests.parity.reference import largest_gap, reference_run, validation_loss
from tests.support.configs import BALANCED, small_config
from tests.support.runs import RunNumbers, assert_same_run, run

TOLERANCE = 1e-9
ODD = {**BALANCED, "model__vocab_size": 101, "train__micro_batch_size": 1, "model__qk_norm": True}
DENSE = {"model__moe": None, "model__vocab_size": 101, "train__micro_batch_size": 1}


def config_of(layout, optimizer="muon", *, steps=4, sequence_parallel=False, base=ODD, **overrides):
    tensor, expert, pipeline, data = layout
    return small_config(
        optimizer,
        **{
            **base,
            "train__steps": steps,
            "train__eval_interval": 2,
            "parallel__tensor": tensor,
            "parallel__expert": expert,
            "parallel__pipeline": pipeline,
            "parallel__data": data,
            "parallel__sequence_parallel": sequence_parallel,
            **overrides,
        },
    )


@lru_cache(maxsize=40)
def cached_run(config: Config) -> RunNumbers:
    return run(config)


def on_one_rank(config: Config) -> RunNumbers:
    parallel = dataclasses.replace(
        config.parallel, tensor=1, expert=1, pipeline=1, data=1, sequence_parallel=False, virtual_stages=None
    )
    return cached_run(dataclasses.replace(config, parallel=parallel))


def assert_layout_changes_nothing(config: Config) -> None:
    one = on_one_rank(config)
    assert (one.column("grad_norm") > config.train.clip_grad_norm).any(), "clipping never acted"
    assert_same_run(one, run(config), tolerance=TOLERANCE)


SLOW = pytest.mark.slow("layouts")

# Every pair of axes, both schedules and optimizers, sequence parallelism on and off; the slow tier has every layout.
COVERING = [
    ((2, 1, 2, 1), "2bw", "muon", True, {**ODD, "correction__name": "error_feedback"}),
    ((1, 2, 2, 1), "2bw", "adamw", False, ODD),
    ((1, 1, 2, 2), "1f1b", "muon", False, ODD),
    ((2, 2, 1, 1), "1f1b", "adamw", True, ODD),
    ((2, 1, 1, 2), "2bw", "muon", False, DENSE),
    ((1, 2, 1, 2), "1f1b", "muon", False, ODD),
    ((2, 1, 1, 1), "1f1b", "adamw", False, {**DENSE, "model__qk_norm": True}),
]


@pytest.mark.parametrize(("layout", "schedule", "optimizer", "sequence_parallel", "base"), COVERING)
def test_a_layout_changes_no_number(layout, schedule, optimizer, sequence_parallel, base):
    assert_layout_changes_nothing(
        config_of(layout, optimizer, sequence_parallel=sequence_parallel, base=base, schedule__name=schedule)
    )


def every_layout():
    for layout in itertools.product((1, 2), repeat=4):
        if 1 < ParallelDims(*layout).world_size <= 8:
            for sequence_parallel in (False, True)[: layout[0]]:
                yield layout, sequence_parallel


@SLOW
@pytest.mark.parametrize("model", ["moe", "dense"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(("layout", "sequence_parallel"), list(every_layout()))
def test_every_layout_changes_no_number(layout, sequence_parallel, optimizer, schedule, model):
    base = ODD if model == "moe" else DENSE
    correction = "error_feedback" if schedule == "2bw" and optimizer == "muon" else "none"
    assert_layout_changes_nothing(
        config_of(
            layout,
            optimizer,
            steps=10,
            sequence_parallel=sequence_parallel,
            base=base,
            schedule__name=schedule,
            correction__name=correction,
        )
    )


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        # a tied embedding is summed over the end stages in the shares that data-parallel ranks have of it
        ((1, 1, 2, 2), {"model__tie_embeddings": True}),
        pytest.param((2, 1, 2, 2), {"model__tie_embeddings": True, "parallel__sequence_parallel": True}, marks=SLOW),
        # each stage clips by its own norm, which all its ranks have a part of
        ((2, 1, 2, 1), {"schedule__name": "pipedream", "train__global_batch_size": 1}),
        # weight gradients wait, collectives do not
        pytest.param((2, 1, 2, 1), {"schedule__name": "zb_h1", "parallel__sequence_parallel": True}, marks=SLOW),
        ((1, 2, 2, 1), {"schedule__name": "interleaved_2bw", "correction__name": "error_feedback"}),
        ((1, 1, 1, 2), {"schedule__name": "2bw", "schedule__overlap_step": False}),
        ((1, 1, 2, 2), {"schedule__sync_start_steps": 2, "schedule__sync_cooldown_steps": 1}),
        # what an expert may take is by a rank's own microbatch, wherever the expert is
        ((1, 2, 1, 2), {"model__moe__capacity_factor": 0.6}),
        # axes of more than two ranks, sizes that divide by three
        pytest.param(
            (3, 1, 1, 1),
            {
                "model__hidden_size": 24,
                "model__num_heads": 6,
                "model__num_kv_heads": 3,
                "model__seq_length": 9,
                "parallel__sequence_parallel": True,
                "correction__name": "error_feedback",
            },
            marks=SLOW,
        ),
        pytest.param(
            (1, 4, 1, 1), {"model__moe__score_function": "sigmoid", "model__moe__normalize_top_k": False}, marks=SLOW
        ),
    ],
    ids=[
        "tied",
        "tied over tensor ranks",
        "pipedream",
        "zb_h1",
        "interleaved_2bw",
        "exposed step",
        "phases",
        "capacity",
        "three tensor ranks",
        "four expert ranks",
    ],
)
def test_schedules_and_features_at_a_layout(layout, overrides):
    config = config_of(layout, steps=5, **overrides)
    if config.schedule.name == "pipedream":  # its delays follow the stages: one rank per stage is the reference
        alone = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tensor=1))
        assert_same_run(run(alone), run(config), tolerance=TOLERANCE)
        return
    assert_layout_changes_nothing(config)


@pytest.mark.parametrize("optimizer", ["soap", *(pytest.param(o, marks=SLOW) for o in ("normuon", "adan", "mars"))])
def test_other_rules_at_a_layout(optimizer):
    """Their states lie with whole matrices, or in shares, as those of Muon and AdamW; 1e-7 is promised."""
    config = config_of((2, 1, 1, 2), optimizer, correction__name="error_feedback")
    assert_same_run(on_one_rank(config), run(config), tolerance=1e-7)


@pytest.mark.parametrize(("schedule", "delay"), [("1f1b", 0), ("2bw", 1)])
def test_balanced_experts_equal_the_hand_written_loop(schedule, delay):
    """Biases and fractions follow the weight version, through the delay; the losses count in the gradient."""
    config = config_of((1, 1, 1, 1), steps=8, schedule__name=schedule)
    ours, by_hand = on_one_rank(config), reference_run(config, delay=delay)
    for row in (row for row in ours.rows if row["kind"] == "val"):
        done = row["step"]  # of the newest z, with the newest biases
        z = by_hand.z[done if delay == 0 or done == 8 else done - 1]
        updates = done if delay == 0 or done == 8 else done - 1
        expected = validation_loss(by_hand, {**z, **by_hand.buffers[updates]}, config)
        assert row["loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert list(ours.column("loss")) == pytest.approx(by_hand.losses, rel=TOLERANCE)
    assert list(ours.column("grad_norm")) == pytest.approx(by_hand.norms, rel=TOLERANCE)
    assert largest_gap(ours.weights, by_hand.weights) < TOLERANCE
    wrong = reference_run(config, delay=1 - delay)
    assert largest_gap(ours.weights, wrong.weights) > 1e-4


@pytest.mark.parametrize(
    ("optimizer", "adaptive"),
    [
        pytest.param("adamw", True, marks=SLOW),
        ("muon", False),
        pytest.param("adamw", False, marks=SLOW),
        pytest.param("muon", True, marks=SLOW),
    ],
)
def test_taylor_equals_the_hand_written_loop_at_any_layout(optimizer, adaptive):
    """DC-ASGD after clipping, through a synchronous start; strong enough to be seen."""
    correction = {"name": "taylor", "strength": 2.0 if adaptive else 200.0, "adaptive": adaptive}
    settings = {"correction": correction, "schedule__sync_start_steps": 2, "train__warmup_steps": 0}
    config = config_of((1, 1, 1, 1), optimizer, steps=8, **settings)
    one, by_hand = on_one_rank(config), reference_run(config, delay=1)
    assert list(one.column("loss")) == pytest.approx(by_hand.losses, rel=TOLERANCE)
    assert largest_gap(one.weights, by_hand.weights) < TOLERANCE
    without = reference_run(dataclasses.replace(config, correction=NoCorrection("none")), delay=1)
    assert largest_gap(one.weights, without.weights) > 1e-4
    assert_same_run(
        one,
        run(config_of((2, 1, 2, 1) if adaptive else (1, 2, 2, 1), optimizer, steps=8, **settings)),
        tolerance=TOLERANCE,
    )


@pytest.mark.parametrize("name", list(BALANCED))
def test_each_balancing_acts(name):
    """Else the layouts would agree about nothing."""
    plain = on_one_rank(config_of((1, 1, 1, 1)))
    without = on_one_rank(config_of((1, 1, 1, 1), **{name: 0.0}))
    gaps = [abs(plain.weights[n] - w).max() for n, w in without.weights.items()]
    assert max(gaps) > 1e-5


def test_the_mesh_of_ranks():
    """Tensor-parallel ranks are neighbours; groups partition the ranks."""
    layout = ParallelDims(pipeline=2, data=3, expert=2, tensor=2)
    assert layout.world_size == 24
    assert layout.ranks_along(5, ("tensor",)) == (4, 5)
    assert layout.ranks_along(5, ("pipeline",)) == (5, 17)
    assert layout.ranks_along(0, ("data", "expert")) == (0, 2, 4, 6, 8, 10)
    for count in range(1, 5):
        for axes in itertools.combinations(AXES, count):
            groups = {layout.ranks_along(rank, axes) for rank in range(24)}
            assert sorted(rank for group in groups for rank in group) == list(range(24))
            for group in groups:
                assert [layout.index(rank, axes) for rank in group] == list(range(layout.size(axes)))
