"""Layouts at their edges: all tokens to one expert, ranks without a matrix, odd shapes, masked microbatches."""

import itertools
from datetime import timedelta

import numpy as np
import pytest
import torch

from megaasync.config.parallel_dims import ParallelDims
from megaasync.config.pipeline import phases_of
from megaasync.data.microbatches import Microbatch
from megaasync.distributed.groups import join_group, leave_group
from megaasync.distributed.mesh import Mesh
from megaasync.distributed.sharding import Sharding
from megaasync.entry.spawn import spawn_ranks
from megaasync.models.parameters import roles_of
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import route_parameters
from megaasync.optim.sharded_reducer import ShardedReducer
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.update_rules.newton_schulz import orthogonalize
from tests.parity.test_mesh import ODD, assert_layout_changes_nothing, config_of
from tests.support.configs import small_config
from tests.support.engine import build
from tests.support.runs import assert_same_run, run

GATE = "layers.1.mlp.experts.gate"


def one_expert_rank(environment, config, favourites):
    """All tokens of a step go to that step's favourite expert; z of the gates and their momentum after each step."""
    executor = build(environment, config).executor
    (stage,) = executor.runner.stages.values()
    seen = []

    def favour(step):
        stage.balance.bias_LE.zero_()
        stage.balance.bias_LE[:, favourites[min(step, len(favourites) - 1)]] = 100.0

    favour(0)
    stage.balance.write_version(0)
    make_step = stage.step

    def step(number, **arguments):
        favour(number + 1)  # absorbed and published by the step
        make_step(number, **arguments)
        layout, whole = stage.optimizer.layout, stage.whole_master()
        momentum = torch.zeros_like(stage.master)
        for run_, state in zip(layout.groups, stage.optimizer.states, strict=True):
            if "m" in state and run_.owners is None:
                run_.view_shard(momentum).copy_(state["m"])
        flat = torch.zeros_like(whole)
        layout.scatter_shard(momentum, flat)
        seen.append([layout.views(item)[layout.names.index(GATE)].clone().numpy() for item in (whole, flat)])

    stage.step = step
    results = list(executor.run(*phases_of(config), 0, config.train.steps, flush=True))
    leave_group()
    return [(r.loss, r.grad_norm, r.expert_load) for r in results], seen


def test_all_tokens_to_one_expert():
    """Expert 0 in the first two steps, then expert 1; experts 2 and 3, on the other rank, are never touched."""
    config = config_of(
        (1, 2, 1, 1),
        steps=4,
        model__moe__top_k=1,
        model__moe__bias_update_rate=1e-9,
        schedule__name="1f1b",
        train__lr_schedule="constant",
        train__warmup_steps=0,
    )
    (rows, here), (other_rows, there) = spawn_ranks(one_expert_rank, (config, [0, 0, 1, 1]), world_size=2)
    assert rows == other_rows
    assert np.isfinite([row[:2] for row in rows]).all()
    assert [row[2] for row in rows] == [4.0] * 4  # the busiest of four has all
    decay = 1 - config.optimizer.lr * config.optimizer.weight_decay
    for before, after in itertools.pairwise(there):
        np.testing.assert_allclose(after[0], decay * before[0], rtol=1e-12)  # never touched: decay only
        assert (after[1] == 0).all()
    # expert 0 once it is left alone: its momentum decays and its update is that momentum's
    for (z, m), (z_next, m_next) in itertools.pairwise(here[1:]):
        np.testing.assert_allclose(m_next[0], config.optimizer.momentum * m[0], rtol=1e-12)
        steps, scale = config.optimizer.newton_schulz_steps, 0.2 * max(m[0].shape) ** 0.5
        update = scale * orthogonalize(torch.from_numpy(m[0]), steps=steps).numpy()
        np.testing.assert_allclose(z_next[0], decay * z[0] - config.optimizer.lr * update, rtol=1e-10, atol=1e-13)
        assert np.abs(update).max() > 0


def test_more_ranks_than_matrices():
    """One dense layer has seven matrices; an eighth data rank has none to orthogonalise and takes part in all else."""
    base = {"model__moe": None, "model__num_layers": 1, "train__micro_batch_size": 1}
    config = config_of((1, 1, 1, 8), base=base, schedule__name="1f1b")
    alone = config_of((1, 1, 1, 1), base=base, schedule__name="1f1b")
    assert_same_run(run(alone), run(config), tolerance=1e-9)


def test_no_muon_at_all_and_no_expert_on_a_stage():
    """Plain gradient descent has no state; the first of four stages has no router."""
    assert_layout_changes_nothing(config_of((1, 1, 4, 2), "sgd", steps=3, base={**ODD, "train__micro_batch_size": 1}))


SHAPES = {
    "layers.0.attention.query.weight": (7, 5),
    "layers.0.attention.output.weight": (7, 5),
    "layers.1.attention.query.weight": (7, 5),
    "layers.0.mlp.experts.gate": (3, 7, 5),
    "embedding.weight": (11, 5),
    "final_norm.weight": (5,),
}


def gradients_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def odd_rank(environment, ranks):
    """Three 7 x 5 matrices, a stack of three, and odd vectors, over two data ranks, or on one that sees both."""
    device = torch.device("cpu")
    join_group(environment, device=device, timeout=timedelta(seconds=60))
    mesh = Mesh(ParallelDims(data=ranks), rank=environment.rank, device_type="cpu", timeout=timedelta(seconds=60))
    axes = ("data", "expert")
    layout = FlatParamLayout(
        SHAPES,
        route_parameters(roles_of(SHAPES), small_config("muon").optimizer),
        shardings=dict.fromkeys(SHAPES, Sharding(None, 0, axes)),
        dims=mesh.dims,
        rank=mesh.rank,
    )
    data_parallel = ShardedReducer(layout, {mesh.dims.effective(axes): mesh.new_group(*axes)})
    optimizer = StageOptimizer(layout, list(gradients_of(9).values()), dtype=torch.float64, learning_rate=lambda k: 0.1)
    flat, weights = (torch.zeros(layout.size, dtype=torch.float64) for _ in range(2))
    for step in range(3):
        seen = [gradients_of(10 * step + item) for item in ([mesh.rank] if ranks > 1 else [0, 1])]
        for view, *parts in zip(layout.views(flat), *(item.values() for item in seen), strict=True):
            view.copy_(sum(parts))
        data_parallel.reduce(flat)
        optimizer.step(flat, scale=0.5, out=weights, lookahead_steps=1)
        data_parallel.gather(weights)
    leave_group()
    owned = [(run_.matrix_shape, run_.state_shape) for run_ in layout.groups if run_.matrix_shape]
    return {n: v.numpy() for n, v in zip(layout.names, layout.views(weights), strict=True)}, owned


def test_odd_matrices_over_two_ranks():
    """Six matrices of 7 x 5 as they lie, whole: three on each rank, a stack cut between two of its matrices."""
    (alone, _), (one, owned), (other, others_owned) = (
        *spawn_ranks(odd_rank, (1,), world_size=1),
        *spawn_ranks(odd_rank, (2,), world_size=2),
    )
    for name, weight in alone.items():
        np.testing.assert_allclose(one[name], weight, rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(one[name], other[name])
    for mine in (owned, others_owned):
        assert sum(shape[0] for _, shape in mine) == 3
        assert {matrix for matrix, _ in mine} == {(7, 5)}


def masked_rank(environment, config):
    executor = build(environment, config).executor
    source, layout = executor._source, config.parallel_dims
    share = layout.index(environment.rank, ("data", "expert"))

    class Masked:
        """Valid tokens by the microbatch's number in the whole batch: 0, 1, 5, all, 0, ..."""

        def get(self, step, microbatch):
            given, number = source.get(step, microbatch), microbatch * config.data_ranks + share
            mask = torch.zeros_like(given.mask_BS)
            mask.view(-1)[: (0, 1, 5, mask.numel())[number % 4]] = True
            return Microbatch(given.tokens_BS, given.labels_BS, mask)

    executor._source = Masked()
    results = list(executor.run(*phases_of(config), 0, config.train.steps, flush=True))
    leave_group()
    return [(r.loss, r.grad_norm, r.tokens, r.expert_load, *r.routing_losses) for r in results]


@pytest.mark.parametrize(
    ("layout", "sequence_parallel"), [((1, 1, 1, 2), False), ((2, 1, 1, 1), True), ((1, 2, 2, 1), False)]
)
def test_padding_counts_nowhere_at_any_layout(layout, sequence_parallel):
    """Losses, norms, loads and the routers' losses are of the valid tokens; one microbatch of four has none."""

    def numbers(**arguments):
        config = config_of(arguments.pop("layout"), steps=3, **arguments)
        ranks = spawn_ranks(masked_rank, (config,), world_size=config.world_size)
        assert all(rank == ranks[0] for rank in ranks)
        return ranks[0]

    one = numbers(layout=(1, 1, 1, 1))
    assert {row[2] for row in one} == {2 * (1 + 5 + 8)}
    np.testing.assert_allclose(numbers(layout=layout, sequence_parallel=sequence_parallel), one, rtol=1e-9)
