"""`train.deterministic` takes no operation away that the engine needs, and changes no number on a CPU."""

import torch

from megaasync.entry.spawn import spawn_ranks
from megaasync.train.determinism import repeat_exactly
from tests.support.cli import TINY, metrics, pretrain
from tests.support.configs import BALANCED, small_config
from tests.support.runs import put_together, run, run_rank


def exact_rank(environment, config):
    repeat_exactly()
    assert torch.are_deterministic_algorithms_enabled()
    return run_rank(environment, config)


def test_every_operation_of_a_run_has_a_deterministic_algorithm():
    """All that balances experts, a split backward, bfloat16 and recomputation; bit for bit the run without it."""
    config = small_config(
        **BALANCED, parallel__pipeline=2, schedule__name="zb_h1", train__recompute="selective", train__dtype="bfloat16",
        train__steps=3,
    )  # fmt: skip
    parts, plain = spawn_ranks(exact_rank, (config,), world_size=2), run(config)
    weights = put_together(parts, config)
    assert all((weights[name] == weight).all() for name, weight in plain.weights.items())


def test_the_key_is_heeded(tmp_path):
    ran = pretrain(*TINY, "train.steps=2", "train.deterministic=true", "run.dir=run", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert "train:" in (tmp_path / "run/config.yaml").read_text() and len(metrics(tmp_path / "run")) == 2
    assert "deterministic: true" in (tmp_path / "run/config.yaml").read_text()
