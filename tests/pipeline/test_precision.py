"""Which numbers are kept in which precision, and what float32 and bfloat16 cost."""

import gc
import weakref

import numpy as np
import pytest
import torch

from tests.support.configs import small_config
from tests.support.engine import ALONE, build, update_of
from tests.support.runs import run


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_keeps_its_gradients_and_masters_in_float32(optimizer):
    """Norms within 2 % of float32's over five steps, the same on one and two stages; masters are float32."""

    def numbers(dtype, stages=1, **overrides):
        return run(
            small_config(
                optimizer,
                train__dtype=dtype,
                parallel__pipeline=stages,
                train__steps=5,
                optimizer__lr=1e-3,
                model__moe=None,
                **overrides,
            )
        )

    exact, half, half_on_two = numbers("float32"), numbers("bfloat16"), numbers("bfloat16", 2)
    split = numbers("bfloat16", 2, schedule__name="zb_h1")
    whole = numbers("bfloat16", 2, schedule__name="1f1b")
    np.testing.assert_allclose(split.column("grad_norm"), whole.column("grad_norm"), rtol=0.01)
    np.testing.assert_allclose(half.column("grad_norm"), exact.column("grad_norm"), rtol=0.02)
    np.testing.assert_allclose(half.column("loss"), half_on_two.column("loss"), rtol=1e-6)
    assert all(weight.dtype == np.float32 for weight in half.weights.values())
    moved = half.weights["layers.1.attention.query.weight"]
    start = numbers_at_start("bfloat16")
    assert 0 < np.abs(moved - start).max() < 0.05


def numbers_at_start(dtype):
    stage = update_of(build(ALONE, small_config(train__dtype=dtype, model__moe=None)).executor)
    index = stage.optimizer.layout.names.index("layers.1.attention.query.weight")
    return stage.optimizer.layout.views(stage.master)[index].numpy()


def test_bfloat16_masters_start_from_the_draw_and_not_from_its_rounding():
    """Else every layout's first updates would carry an error of half a bfloat16 step."""
    stage, exact = (
        update_of(build(ALONE, small_config(train__dtype=dtype)).executor) for dtype in ("bfloat16", "float32")
    )
    assert torch.equal(stage.whole_master(), exact.whole_master())
    assert torch.equal(stage.versions.flat(0), exact.whole_master().to(torch.bfloat16))
    assert not torch.equal(stage.whole_master(), exact.whole_master().to(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_over_gives_its_memory_back(dtype):
    """Hooks of parameters hold the gradient sums; a circle through them could never be collected."""
    trainer = build(ALONE, small_config(train__dtype=dtype, train__steps=3))
    trainer.train()
    stage = trainer.executor.stages[0]
    held = [
        weakref.ref(gradient) for gradient in (stage.gradients, stage.versions.module(0), stage.gradients.sum_of(0))
    ]
    del trainer, stage
    gc.collect()
    assert [item() for item in held] == [None] * 3


def test_float32_stays_near_float64_for_a_dense_model():
    """float32 within 1e-4 over 20 steps for dense models, on two stages against one."""

    def numbers(stages):
        return run(small_config("adamw", train__dtype="float32", parallel__pipeline=stages, model__moe=None))

    one, two = numbers(1), numbers(2)
    np.testing.assert_allclose(one.column("loss"), two.column("loss"), rtol=1e-4)
