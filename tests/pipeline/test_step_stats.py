"""The statistics of a step: what each slot means, over several ranks, and what the message of a broken batch says."""

import torch

from megaasync.optim.expert_balance import NUM_STATS
from megaasync.pipeline.step_stats import StepResult, StepStats

CPU = torch.device("cpu")
SIZES = {"num_stages": 3, "num_microbatches": 4}


def stats_of(index, squares, *, losses=None, tokens=0.0, routing=None):
    """One rank's part: losses by microbatch on the last stage only."""
    stats = StepStats(**SIZES, device=CPU)
    sums = None if losses is None else torch.tensor([sum(losses), tokens, *losses], dtype=torch.float64)
    figures = None if routing is None else torch.tensor(routing, dtype=torch.float64)
    stats.set_stage(index, torch.tensor(squares, dtype=torch.float64), sums=sums, routing=figures)
    return stats


def summed(*parts):
    total = StepStats(**SIZES, device=CPU)
    for part in parts:
        total.add(part)
    return total.result(7, backward_done_at=1.5)


def test_a_step_by_hand():
    """Two data-parallel ranks of three stages: losses 6 and 10 over 8 tokens, squares 9 + 16 + 144 + 400 + 56 = 625."""
    stopping = stats_of(0, 9.0)
    stopping.set_stop(True)
    result = summed(
        stopping,
        stats_of(0, 16.0),
        stats_of(1, 144.0, routing=[3.0, 2.0, 8.0, 16.0, 0.0]),
        stats_of(2, 400.0, losses=[1.0, 2.0, 3.0, 0.0], tokens=3.0),
        stats_of(2, 56.0, losses=[4.0, 3.0, 2.0, 1.0], tokens=5.0),
    )
    assert NUM_STATS == 5
    assert result == StepResult(7, 2.0, 25 / 8, 8, 1.5, True, 1.5, (1.0, 2.0, 0.0), (), ())
    assert result.is_finite


def test_an_empty_batch_has_a_loss():
    assert summed(stats_of(2, 0.0, losses=[0.0] * 4)) == StepResult(7, 0.0, 0.0, 0, 1.5, False)


def test_what_is_not_finite_is_named_by_stage_and_microbatch():
    result = summed(
        stats_of(0, 1.0),
        stats_of(1, float("inf")),
        stats_of(2, float("nan"), losses=[1.0, float("nan"), 2.0, float("-inf")], tokens=4.0),
    )
    assert (result.broken_stages, result.broken_microbatches) == ((1, 2), (1, 3))
    assert not result.is_finite
    text = result.explain(clips_globally=True, skipped_before=None)
    assert text.startswith(
        "step 8: loss nan and global gradient norm nan are not both finite (losses of microbatches 2, 4"
    )
    assert "; gradients of stages 1, 2); nothing of this step was applied. Try a lower optimizer.lr" in text
    text = result.explain(clips_globally=False, skipped_before=2)
    assert "stages with such a gradient left it out; 2 batches were skipped before, as train.max_skipped allows" in text
