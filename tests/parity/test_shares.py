"""What ranks hold, compute and send: ZeRO-1 bytes, Newton-Schulz work, memory and communication as planned."""

import collections
import functools

import numpy as np
import pytest
import torch
from torch import distributed as dist

from megaasync.config.pipeline import phases_of
from megaasync.distributed import rank_group
from megaasync.distributed.groups import leave_group
from megaasync.entry.spawn import spawn_ranks
from megaasync.plan.plan import make_plan
from megaasync.update_rules import newton_schulz
from megaasync.update_rules.newton_schulz import orthogonalize
from tests.parity.test_mesh import DENSE, ODD, config_of
from tests.support.engine import build
from tests.support.runs import run_rank
from tests.support.tiers import slow_params


def holding_rank(environment, config):
    """Bytes that a rank holds by kind, counted on its live tensors after two steps."""
    executor = build(environment, config).executor
    for _ in executor.run(*phases_of(config), 0, 2, flush=True):
        pass
    found = collections.Counter()
    for stage in executor.runner.stages.values():
        found["weights"] += sum(stage.versions.flat(v).nbytes for v in range(stage.versions.num_slots))
        found["gradients"] += sum(buffer.nbytes for buffer in stage.gradients._buffers)
        found["master"] += stage.master.nbytes
        found["optimizer_state"] += stage.optimizer.state_bytes
        parameters = {p.untyped_storage().data_ptr() for m in stage.versions.modules for p in m.parameters()}
        flats = {stage.versions.flat(v).untyped_storage().data_ptr() for v in range(stage.versions.num_slots)}
        assert parameters == flats, "weights lie outside the flat buffers"
    leave_group()
    return found


@pytest.mark.parametrize(
    ("layout", "optimizer", "schedule"),
    [((1, 1, 1, 2), "adamw", "2bw"), ((2, 1, 2, 1), "muon", "2bw"), ((1, 2, 1, 2), "muon", "1f1b")],
)
def test_bytes_held_are_those_of_the_plan(layout, optimizer, schedule):
    config = config_of(layout, optimizer, schedule__name=schedule)
    held = spawn_ranks(holding_rank, (config,), world_size=config.world_size)
    for stage in make_plan(config)["stages"]:
        first, count = stage["rank"], config.world_size // config.parallel.pipeline
        for kind in ("weights", "gradients", "master", "optimizer_state"):
            most = max(held[rank][kind] for rank in range(first, first + count))
            assert most == stage["bytes"][kind], (stage["stage"], kind)


def test_two_data_ranks_hold_half_of_masters_and_states_each():
    """Of a model large enough that the cut between matrices is even."""
    shape = {"model__num_layers": 8, "model__moe": None}
    (one,) = spawn_ranks(holding_rank, (config_of((1, 1, 1, 1), **shape),), world_size=1)
    two = spawn_ranks(holding_rank, (config_of((1, 1, 1, 2), **shape),), world_size=2)
    for kind in ("master", "optimizer_state"):
        for rank in two:
            assert rank[kind] == pytest.approx(one[kind] / 2, rel=0.06), kind
        assert sum(rank[kind] for rank in two) == pytest.approx(one[kind], rel=0.02)


def counting_rank(environment, config):
    calls = []

    def counted(matrices, *, steps, precision):
        calls.append(tuple(matrices.shape))
        return orthogonalize(matrices, steps=steps, precision=precision)

    newton_schulz.orthogonalize = counted  # of this process, which ends with the run
    numbers = run_rank(environment, config)
    return calls, numbers


def matrices_of(calls):
    """How many matrices of each shape."""
    found = collections.Counter()
    for count, *shape in calls:
        found[tuple(shape)] += count
    return found


@pytest.mark.parametrize(
    ("layout", "base"),
    slow_params(
        [
            ((1, 1, 1, 2), DENSE),
            ((2, 1, 1, 1), DENSE),
            ((1, 2, 1, 1), ODD),
            ((2, 1, 1, 2), ODD),
            ((1, 1, 2, 2), DENSE),
        ],
        kept=(1, 3),
        area="layouts",
    ),
)
def test_each_matrix_is_orthogonalised_whole_and_once(layout, base):
    """On whichever rank; no rank does all of them; the work is spread over the ranks that hold copies or parts."""
    config = config_of(layout, steps=2, base=base)
    (alone,) = spawn_ranks(counting_rank, (config_of((1, 1, 1, 1), steps=2, base=base),), world_size=1)
    ranks = spawn_ranks(counting_rank, (config,), world_size=config.world_size)
    assert sum((matrices_of(calls) for calls, _ in ranks), collections.Counter()) == matrices_of(alone[0])
    work = [sum(n * max(shape) * min(shape) ** 2 for n, *shape in calls) for calls, _ in ranks]
    per_stage = config.world_size // config.parallel.pipeline
    for first in range(0, config.world_size, per_stage):
        of_stage = work[first : first + per_stage]
        assert max(of_stage) <= 1.25 * sum(of_stage) / per_stage, "one rank of a stage does more than its part"


def test_three_matrices_over_two_ranks():
    """One layer without experts has seven matrices of four shapes; three of one shape do not divide by two."""
    shape = {"model__moe": None, "model__num_layers": 3, "model__num_kv_heads": 4}
    config, alone = config_of((1, 1, 1, 2), steps=2, **shape), config_of((1, 1, 1, 1), steps=2, **shape)
    ranks = spawn_ranks(counting_rank, (config,), world_size=2)
    (one,) = spawn_ranks(counting_rank, (alone,), world_size=1)
    assert sum((matrices_of(calls) for calls, _ in ranks), collections.Counter()) == matrices_of(one[0])
    counts = [matrices_of(calls)[16, 24] for calls, _ in ranks]  # down projections: three
    assert sum(counts) == 3 * 2
    assert 0 < min(counts)
    for name, weight in one[1].weights.items():
        np.testing.assert_allclose(ranks[0][1].weights[name], weight, rtol=0, atol=1e-9 * np.abs(weight).max())


def sending_rank(environment, config):
    """Bytes handed to each collective and message in the steps of a segment, by the size of the group."""
    executor = build(environment, config).executor
    sent = collections.Counter()

    def wrap(module, name, key, handed):
        original = getattr(module, name)

        @functools.wraps(original)
        def counted(*args, **kwargs):
            sent[key] += handed(*args, **kwargs).nbytes
            return original(*args, **kwargs)

        setattr(module, name, counted)

    wrap(rank_group, "_all_gather", "all_gather", lambda whole, part, **_: part)
    wrap(rank_group, "_reduce_scatter", "reduce_scatter", lambda part, whole, **_: whole)
    wrap(dist, "all_reduce", "all_reduce", lambda tensor, *_, **__: tensor)
    wrap(dist, "reduce", "reduce", lambda tensor, root, **_: tensor)
    wrap(dist, "all_to_all_single", "all_to_all", lambda received, given, *_, **__: given)
    wrap(dist, "isend", "send", lambda tensor, *_, **__: tensor)
    nothing = torch.zeros(0)
    wrap(
        dist,
        "broadcast",
        "broadcast",
        lambda tensor, root, **_: tensor if root == environment.rank else nothing,
    )
    for _ in executor.run(*phases_of(config), 0, config.train.steps, flush=True):
        pass
    leave_group()
    return sent


@pytest.mark.parametrize(
    ("layout", "sequence_parallel", "overrides"),
    slow_params(
        [
            ((2, 1, 2, 1), True, {"schedule__name": "1f1b"}),
            ((2, 1, 2, 1), False, {"model__tie_embeddings": True}),
            ((1, 2, 2, 1), False, {}),
            ((2, 2, 1, 1), True, {"schedule__name": "1f1b"}),
            ((2, 1, 1, 2), False, {"model__vocab_size": 102}),
            ((1, 1, 2, 2), False, {"optimizer": "adamw"}),
            ((1, 1, 2, 2), False, {"schedule__name": "pipedream", "train__global_batch_size": 2}),
        ],
        kept=(0, 1, 4),
        area="layouts",
    ),
)
def test_bytes_sent_are_those_of_the_plan(layout, sequence_parallel, overrides):
    """All ranks and collectives of a few steps together; per step, all of it."""
    overrides = dict(overrides)
    optimizer = overrides.pop("optimizer", "muon")
    config = config_of(layout, optimizer, steps=3, sequence_parallel=sequence_parallel, base=ODD, **overrides)
    counted = sum(spawn_ranks(sending_rank, (config,), world_size=config.world_size), collections.Counter())
    planned = make_plan(config)["communication_bytes_per_step"]
    kinds = {
        "send": planned["pipeline"],
        "all_to_all": planned["experts"] + planned["whole matrices"],
    }
    for kind, per_step in kinds.items():
        assert counted[kind] == 3 * per_step, kind
    assert sum(counted.values()) == 3 * sum(planned.values()), (counted, planned)
