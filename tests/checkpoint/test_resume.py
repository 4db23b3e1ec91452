"""Save, load and go on: bit for bit at the same layout, to 1e-9 at another one, in float64."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megaasync.checkpoint.paths import checkpoints_in, folder_name
from megaasync.entry.spawn import RankFailed, spawn_ranks
from megaasync.pipeline.stage_compute import StageCompute
from tests.support.configs import BALANCED, small_config
from tests.support.runs import CLOCKS, run, run_rank
from tests.support.tiers import slow_params

STEPS, SAVED = 9, 4
LAYOUTS = {
    "one": {},
    "data 2": {"parallel__data": 2},
    "expert 2": {"parallel__expert": 2},
    "tensor 2": {"parallel__tensor": 2},
    "pipeline 2": {"parallel__pipeline": 2},
    "pipeline 2, data 2": {"parallel__pipeline": 2, "parallel__data": 2},
    "tensor 2, expert 2": {"parallel__tensor": 2, "parallel__expert": 2, "parallel__sequence_parallel": True},
    "pipeline 2, tensor 2": {"parallel__pipeline": 2, "parallel__tensor": 2},
    "data 2, expert 2": {"parallel__data": 2, "parallel__expert": 2},
    "pipeline 4": {"parallel__pipeline": 4},
}
SMALL = {
    "train__steps": STEPS,
    "train__micro_batch_size": 1,
    "train__global_batch_size": 16,
    "train__warmup_steps": 2,
    "train__lr_schedule": "constant",
    "checkpoint__interval": SAVED,
    "checkpoint__keep": 9,
}


def config_of(optimizer, layout="one", **overrides):
    return small_config(optimizer, **{**SMALL, **BALANCED, **LAYOUTS[layout], **overrides})


@functools.cache
def saved(optimizer, layout, schedule, correction):
    """(numbers of an uninterrupted run, its folder of checkpoints)."""
    root = Path(tempfile.mkdtemp(prefix="megaasync-test-"))
    config = config_of(optimizer, layout, schedule__name=schedule, correction__name=correction)
    return run(config, root), root


def rows_after(numbers, step):
    return [
        {key: value for key, value in row.items() if key not in CLOCKS}
        for row in numbers.rows
        if row["kind"] == "train" and row["step"] > step
    ]


def assert_goes_on(whole, resumed, *, tolerance):
    """The rest of the rows, and the final weights."""
    for mine, other in zip(rows_after(resumed, SAVED), rows_after(whole, SAVED), strict=True):
        for key, value in other.items():
            if tolerance == 0 or not isinstance(value, float):
                assert mine[key] == value, (key, mine, other)
            else:
                np.testing.assert_allclose(mine[key], value, rtol=tolerance, err_msg=f"{key} of step {other['step']}")
    for name, weight in whole.weights.items():
        scale = tolerance * np.abs(weight).max()
        np.testing.assert_allclose(resumed.weights[name], weight, rtol=0, atol=scale, err_msg=name)


EXACT = [
    ("muon", "pipeline 2, data 2", "2bw", "error_feedback"),
    ("adamw", "tensor 2, expert 2", "2bw", "none"),
    ("soap", "tensor 2", "2bw", "error_feedback"),
    ("normuon", "expert 2", "1f1b", "none"),
    ("adan", "data 2", "2bw", "none"),
    ("muon", "pipeline 2", "wpipe", "error_feedback"),
    ("mars", "data 2, expert 2", "2bw", "none"),
    ("lion", "pipeline 4", "2bw", "error_feedback"),
    ("sgd", "one", "2bw", "error_feedback"),
]


@pytest.mark.parametrize(
    ("optimizer", "layout", "schedule", "correction"), slow_params(EXACT, kept=(0,), area="survive")
)
def test_the_same_layout_goes_on_bit_for_bit(optimizer, layout, schedule, correction):
    whole, root = saved(optimizer, layout, schedule, correction)
    config = config_of(optimizer, layout, schedule__name=schedule, correction__name=correction)
    resumed = run(config, root / "again", root / folder_name(SAVED))
    assert [row["step"] for row in resumed.rows if row["kind"] == "train"] == list(range(SAVED + 1, STEPS + 1))
    assert_goes_on(whole, resumed, tolerance=0)


@pytest.mark.parametrize("adaptive", slow_params([False, True], kept=(1,), area="survive"))
def test_taylor_goes_on_bit_for_bit(tmp_path, adaptive):
    overrides = {"correction": {"name": "taylor", "strength": 100.0, "adaptive": adaptive}}
    config = config_of("adamw", "pipeline 2", **overrides)
    whole = run(config, tmp_path)
    assert_goes_on(whole, run(config, tmp_path / "again", tmp_path / folder_name(SAVED)), tolerance=0)


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [("interleaved_2bw", "one"), pytest.param("zbv", "pipeline 2", marks=pytest.mark.slow("survive"))],
)
def test_a_tied_embedding_on_one_rank_goes_on_bit_for_bit(tmp_path, schedule, layout):
    """Both of its stages are on one rank, and both copies must be loaded."""
    tied = {"model__tie_embeddings": True, "parallel__virtual_stages": 2}
    config = config_of("muon", layout, schedule__name=schedule, **tied)
    whole = run(config, tmp_path)
    assert_goes_on(whole, run(config, tmp_path / "again", tmp_path / folder_name(SAVED)), tolerance=0)


def test_a_resume_of_a_resume_under_another_schedule_goes_on_exactly(tmp_path):
    """Stopped two steps after the switch, when fewer gradients are pending than the delay will be."""
    _, root = saved("muon", "one", "1f1b", "none")
    config = config_of("muon", schedule__delay=[3], correction__name="error_feedback", checkpoint__interval=6)
    whole = run(config, tmp_path / "a", root / folder_name(SAVED))
    again = run(config, tmp_path / "b", tmp_path / "a" / folder_name(6))
    assert rows_after(again, 6) == rows_after(whole, 6)
    assert all((again.weights[name] == weight).all() for name, weight in whole.weights.items())


@pytest.mark.slow("survive")
def test_at_the_last_step_another_schedule_has_nothing_to_do(tmp_path):
    _, root = saved("muon", "pipeline 2", "1f1b", "none")
    config = config_of("muon", "pipeline 2", correction__name="error_feedback")
    resumed = run(config, tmp_path, root / folder_name(STEPS))
    assert rows_after(resumed, 0) == [] and np.isfinite(resumed.val_loss)


def test_pipedream_goes_on_bit_for_bit(tmp_path):
    """Each stage has as many pending gradients as updates it is behind, and clips by its own norm."""
    config = config_of("adamw", "pipeline 4", schedule__name="pipedream", train__global_batch_size=1)
    whole = run(config, tmp_path)
    assert_goes_on(whole, run(config, tmp_path / "again", tmp_path / folder_name(SAVED)), tolerance=0)


PAIRS = [(item, other) for item in LAYOUTS for other in LAYOUTS if item != other]
_KEPT = [PAIRS.index(pair) for pair in (("pipeline 2, data 2", "tensor 2, expert 2"),)]


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow("survive"))])
@pytest.mark.parametrize(("one", "other"), slow_params(PAIRS, kept=_KEPT, area="survive"))
def test_any_layout_loads_any_other(one, other, optimizer):
    whole, root = saved(optimizer, one, "2bw", "error_feedback")
    config = config_of(optimizer, other, correction__name="error_feedback")
    resumed = run(config, root / other, root / folder_name(SAVED))
    assert_goes_on(whole, resumed, tolerance=1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    slow_params(
        [(("2bw", "error_feedback"), ("1f1b", "none")), (("1f1b", "none"), ("2bw", "error_feedback"))],
        kept=(0,),
        area="survive",
    ),
)
def test_another_schedule_begins_with_settled_weights(before, after):
    """As a phase does: the run equals one with a synchronous start or cooldown at that step."""
    _, root = saved("muon", "pipeline 2", *before)
    resumed = run(
        config_of("muon", "pipeline 2", schedule__name=after[0], correction__name=after[1]),
        root / f"as-{after[0]}",
        root / folder_name(SAVED),
    )
    phases = {"sync_cooldown_steps": STEPS - SAVED} if after[0] == "1f1b" else {"sync_start_steps": SAVED}
    whole = run(
        config_of(
            "muon",
            "pipeline 2",
            correction__name="error_feedback",
            **{f"schedule__{name}": value for name, value in phases.items()},
        )
    )
    assert_goes_on(whole, resumed, tolerance=0)


@pytest.mark.slow("survive")
def test_more_steps_go_on_from_the_last_checkpoint_exactly(tmp_path):
    """The end is flushed after the last checkpoint is written."""
    short = config_of("muon", "pipeline 2", correction__name="error_feedback")
    run(short, tmp_path)
    longer = replace(short, train=replace(short.train, steps=STEPS + 4))
    resumed = run(longer, tmp_path / "again", tmp_path / folder_name(STEPS))
    whole = run(replace(longer, checkpoint=replace(longer.checkpoint, interval=None)))
    assert rows_after(resumed, STEPS) == rows_after(whole, STEPS)
    for name, weight in whole.weights.items():
        assert (resumed.weights[name] == weight).all()


def test_saving_more_often_changes_nothing(tmp_path):
    config = config_of("muon", "pipeline 2", correction__name="error_feedback")
    whole, _ = saved("muon", "pipeline 2", "2bw", "error_feedback")
    often = run(replace(config, checkpoint=replace(config.checkpoint, interval=1)), tmp_path)
    assert rows_after(often, 0) == rows_after(whole, 0)
    assert all((often.weights[name] == weight).all() for name, weight in whole.weights.items())
    assert [found.step for found in checkpoints_in(tmp_path)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optimizer__lr": 0.5}, r"optimizer.lr=0.5: the checkpoint .* was made with optimizer.lr=0.02; set it back"),
        ({"model__hidden_size": 32}, "model.hidden_size=32: the checkpoint .* was made with model.hidden_size=16"),
        (
            {"train__global_batch_size": 32},
            "train.global_batch_size=32: the checkpoint .* was made with train.global_batch_size=16",
        ),
        ({"train__dtype": "float32"}, "train.dtype=float32: the checkpoint .* was made with train.dtype=float64"),
        ({"optimizer__momentum": 0.5}, "optimizer=.* was made with optimizer="),
        ({"train__steps": 3, "train__warmup_steps": 2}, "train.steps=3: the checkpoint .* has 4 steps already"),
    ],
)
def test_what_does_not_fit_is_named(overrides, message):
    _, root = saved("muon", "pipeline 2", "2bw", "error_feedback")
    config = config_of("muon", "pipeline 2", correction__name="error_feedback", **overrides)
    with pytest.raises(RankFailed, match=message) as caught:
        run(config, root / "wrong", root / folder_name(SAVED))
    assert caught.value.is_user_error


def test_another_lr_is_taken_if_told_to(tmp_path):
    _, root = saved("muon", "pipeline 2", "2bw", "error_feedback")
    config = config_of("muon", "pipeline 2", correction__name="error_feedback", optimizer__lr=0.01)
    config = replace(config, checkpoint=replace(config.checkpoint, override=True))
    resumed = run(config, tmp_path, root / folder_name(SAVED))
    assert resumed.column("lr").tolist() == [0.01] * (STEPS - SAVED)


def poisoned_run(environment, config, root, resume):
    """A run whose batch 2 has a gradient that is not finite."""
    backward = StageCompute.backward

    def poison(stage, key, grad, *, version):
        x_grad = backward(stage, key, grad, version=version)
        if key == (2, 0):
            stage.gradients.sum_of(2)[0] = float("inf")
        return x_grad

    StageCompute.backward = poison
    return run_rank(environment, config, root, resume)


def test_skipped_batches_stay_uncounted_after_a_resume(tmp_path):
    """AdamW's bias correction would differ."""
    config = config_of("adamw", correction__name="error_feedback", train__on_nonfinite="skip", train__max_skipped=1)
    (whole,) = spawn_ranks(poisoned_run, (config, tmp_path, None), world_size=1)
    resume = tmp_path / folder_name(SAVED)
    (resumed,) = spawn_ranks(poisoned_run, (config, tmp_path / "again", resume), world_size=1)
    assert [row["skipped"] for row in rows_after(whole, SAVED)] == [1] * (STEPS - SAVED)
    assert_goes_on(whole, resumed, tolerance=0)
