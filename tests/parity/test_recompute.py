"""Recomputation and the loss in chunks in the engine: on two stages under 2bw they change nothing beyond rounding."""

import pytest

from megaasync.entry.spawn import spawn_ranks
from megaasync.models.transformer import TransformerBlock
from tests.support.configs import small_config
from tests.support.runs import assert_same_run, run, run_rank
from tests.support.tiers import slow_params

BASE = {
    "parallel__pipeline": 2,
    "train__steps": 8,
    "model__moe__bias_update_rate": 0.01,
}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_number_on_two_stages(recompute):
    """Float64, to 1e-12; loads of experts and their biases included, which recomputation must not count."""
    kept = run(small_config(**BASE))
    assert_same_run(kept, run(small_config(train__recompute=recompute, **BASE)), tolerance=1e-12)


def test_the_chunks_of_the_loss_change_no_number_on_two_stages():
    whole = run(small_config(train__loss_chunk_tokens=None, **BASE))
    for chunk in (1, 5):
        assert_same_run(whole, run(small_config(train__loss_chunk_tokens=chunk, **BASE)), tolerance=1e-9)


@pytest.mark.parametrize("overrides", [{"parallel__tensor": 2, "parallel__sequence_parallel": True},
                                       {"parallel__expert": 2}, {"schedule__name": "zb_h1"}],
                         ids=["sequence parallel", "expert", "split backward"])  # fmt: skip
@pytest.mark.parametrize("recompute", slow_params(["selective", "full"], kept=(0,), area="layouts"))
def test_what_ranks_exchange_is_exchanged_again(recompute, overrides):
    """Collectives inside of what is made again meet on all ranks."""
    settings = BASE | {"train__steps": 3} | overrides
    kept = run(small_config(**settings))
    assert_same_run(kept, run(small_config(train__recompute=recompute, **settings)), tolerance=1e-9)


def counting_rank(environment, config):
    """Forwards of this rank's layers in a run without a long evaluation."""
    calls, original = [0], TransformerBlock.forward

    def forward(self, *args):
        calls[0] += 1
        return original(self, *args)

    TransformerBlock.forward = forward
    run_rank(environment, config)
    return calls[0]


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_the_engine_s_forwards_are_counted(recompute, times):
    """Two layers a stage, three steps of four microbatches, and one evaluation's forwards without a gradient."""
    config = small_config(parallel__pipeline=2, train__steps=3, train__recompute=recompute, train__eval_sequences=2)
    for calls in spawn_ranks(counting_rank, (config,), world_size=2):
        assert calls == 2 * (3 * 4 * times + 1)
