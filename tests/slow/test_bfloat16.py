"""A bfloat16 run follows the float32 run of the same weights and batches, on every kind of axis."""

import numpy as np
import pytest

from tests.support.configs import small_config
from tests.support.runs import run


def config_of(dtype):
    """Eight ranks: tensor 2, expert 2, pipeline 2, under 2bw."""
    return small_config(
        "adamw",
        train__dtype=dtype,
        train__steps=200,
        train__warmup_steps=20,
        train__global_batch_size=16,
        train__clip_grad_norm=1.0,
        train__eval_sequences=16,
        parallel__pipeline=2,
        parallel__tensor=2,
        parallel__expert=2,
        model__hidden_size=32,
        model__ffn_hidden_size=48,
        model__moe__ffn_hidden_size=16,
        model__seq_length=16,
        model__init_std=0.02,
        optimizer__lr=3e-3,
        data__num_tokens=60_000,
    )


@pytest.mark.slow("layouts")
def test_the_loss_follows_float32():
    """Band: every loss within 1.5 %; norms within 2 % over the first 50 steps, then, as ten steps' means, over all."""
    exact, half = run(config_of("float32")), run(config_of("bfloat16"))
    losses, norms = ((exact.column(name), half.column(name)) for name in ("loss", "grad_norm"))
    off = np.abs(losses[1] / losses[0] - 1)
    apart = np.abs(norms[1] / norms[0] - 1)
    means = [norm.reshape(-1, 10).mean(axis=1) for norm in norms]
    apart_of_means = np.abs(means[1] / means[0] - 1)
    print(
        f"\nloss {losses[0][0]:.3f} to {losses[0][-1]:.3f}, at most {off.max():.2%} off; gradient norms at most "
        f"{apart[:50].max():.2%} apart over 50 steps, {apart_of_means.max():.2%} as means of ten, single steps "
        f"{apart.max():.2%}; validation {exact.val_loss:.4f} and {half.val_loss:.4f}"
    )
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert off.max() < 0.015
    assert apart[:50].max() < 0.02
    assert apart_of_means.max() < 0.02
    assert abs(half.val_loss / exact.val_loss - 1) < 0.005
