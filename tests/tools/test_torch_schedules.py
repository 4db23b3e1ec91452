"""The benchmark compares like with like: torch's schedules on the same model give our losses, optimizer included."""

import numpy as np
import pytest

from megaasync.entry.spawn import spawn_ranks
from tests.support.tiers import slow_params
from tools.bench.case import Case
from tools.bench.real import real_config, run_rank
from tools.bench.torch_schedules import TORCH_SCHEDULES, run_real_rank

SMALL = ("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.seq_length=16")


@pytest.mark.parametrize("name", slow_params(list(TORCH_SCHEDULES), kept=(1, 4)))
def test_losses_are_ours(name):
    ours = Case("megaasync", "1f1b", 2, 4, 6)
    _, losses = spawn_ranks(run_rank, (real_config(ours, SMALL),), world_size=2)[0]
    case = Case("torch", name, 2, 4, 6)
    _, theirs = spawn_ranks(run_real_rank, (case, real_config(case, SMALL)), world_size=2)[0]
    np.testing.assert_allclose(theirs, losses, rtol=1e-4)
    assert losses[-1] < losses[0]
