"""Layers against plain formulas and, for the experts, against a loop over tokens."""

import copy

import pytest
import torch
from torch.nn import functional as F

from megaasync.config.parallel_dims import ParallelDims
from megaasync.data.microbatches import Microbatch
from megaasync.distributed.rank_group import RankGroup
from megaasync.kernels.grouped_linear import grouped_linear_loop
from megaasync.kernels.weight_gradients import expert_linear
from megaasync.models.initialize import initialize_
from megaasync.models.parameters import sharding_of
from megaasync.models.partition import head_cost, layer_cost, partition_layers
from megaasync.models.transformer import DecoderStage, ModelParallelGroups
from megaasync.nn.loss import cross_entropy_sum
from megaasync.nn.moe import MoE
from megaasync.nn.norm import RMSNorm
from megaasync.nn.rope import RotaryTables
from megaasync.nn.tensor_parallel import TensorParallel
from tests.support.configs import moe_config, small_config

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def default_dtype():
    torch.set_default_dtype(DOUBLE)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("sizes", [(16, 12), (16, 13), (15, 12), (7, 5)])  # odd ones cannot go through torch's kernel
@pytest.mark.parametrize("counts", [[8, 0], [0, 8], [3, 5], [0, 0], [4, 4], [0, 0, 8], [1, 0, 7, 0]])
def test_grouped_linear_equals_the_loop(counts, sizes):
    """Forward and both gradients in float32, empty groups included; the weight's also added to a sum in place."""
    torch.manual_seed(0)
    counts_E = torch.tensor(counts)
    x = torch.randn(sum(counts), sizes[0], dtype=torch.float32, requires_grad=True)
    w = torch.randn(len(counts), sizes[1], sizes[0], dtype=torch.float32, requires_grad=True)
    results = []
    for function in (expert_linear, grouped_linear_loop):
        y = function(x, w, counts_E)
        results.append((y, *torch.autograd.grad(y.square().sum() + y.sum(), (x, w))))
    w.main_grad = torch.full_like(w, 2.0)
    y = expert_linear(x, w, counts_E)
    (y.square().sum() + y.sum()).backward()
    assert w.grad is None
    results.append((y, x.grad, w.main_grad - 2.0))
    for result in (results[0], results[2]):
        for ours, reference in zip(result, results[1], strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=2e-5)


def test_torch_s_grouped_kernel_is_what_runs_where_shapes_allow(monkeypatch):
    """Once forward, once for each gradient."""
    calls, original = [], F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **kw: calls.append(1) or original(*args, **kw))
    for width, expected in ((16, 3), (15, 0)):
        w = torch.randn(2, 12, width, dtype=torch.float32, requires_grad=True)
        x = torch.randn(8, width, dtype=torch.float32, requires_grad=True)
        expert_linear(x, w, torch.tensor([3, 5])).sum().backward()
        assert len(calls) == expected
        calls.clear()


def test_grouped_linear_takes_an_expanded_gradient_and_no_rows():
    w = torch.randn(2, 8, 8, dtype=torch.float32, requires_grad=True)
    expert_linear(torch.randn(4, 8, dtype=torch.float32), w, torch.tensor([4, 0])).sum().backward()
    assert w.grad[1].abs().max() == 0
    assert expert_linear(torch.zeros(0, 8, dtype=torch.float32), w, torch.tensor([0, 0])).shape == (0, 8)


def make_moe(top_k=2, shared=0):
    torch.manual_seed(1)
    moe = MoE(moe_config(num_experts=5, top_k=top_k, ffn_hidden_size=6, num_shared_experts=shared), hidden_size=8)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return moe


@pytest.mark.parametrize(("top_k", "shared"), [(1, 0), (2, 0), (3, 2), (5, 1)])
def test_moe_equals_a_loop_over_tokens(top_k, shared):
    moe = make_moe(top_k, shared)
    x = torch.randn(2, 7, 8, requires_grad=True)
    expected = []
    for token in x.reshape(-1, 8):
        probabilities = (moe.router.weight @ token).softmax(0)
        weights, chosen = probabilities.topk(top_k)
        y = torch.zeros(8)
        for weight, e in zip(weights / weights.sum(), chosen, strict=True):
            inner = F.silu(moe.experts.gate[e] @ token) * (moe.experts.up[e] @ token)
            y = y + weight * (moe.experts.down[e] @ inner)
        if shared:
            y = y + moe.shared(token)
        expected.append(y)
    expected = torch.stack(expected).view_as(x)
    actual = moe(x, torch.ones(2, 7, dtype=torch.bool))
    torch.testing.assert_close(actual, expected)
    inputs = [x, *moe.parameters()]
    probe = torch.randn_like(x)
    ours = torch.autograd.grad((actual * probe).sum(), inputs)
    theirs = torch.autograd.grad((expected * probe).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_the_router_works_in_float32_when_the_model_is_bfloat16():
    moe = make_moe().to(torch.bfloat16)
    mask = torch.ones(1, 4, dtype=torch.bool)
    routing = moe.router(torch.randn(1, 4, 8, dtype=torch.bfloat16), mask)
    assert routing.weights_TK.dtype is torch.float32
    torch.testing.assert_close(routing.weights_TK.sum(-1), torch.ones(4, dtype=torch.float32))
    assert moe(torch.randn(1, 4, 8, dtype=torch.bfloat16), mask).dtype is torch.bfloat16


def test_rope_turns_by_position_and_keeps_relative_products():
    rotary = RotaryTables(seq_length=12, head_size=8, theta=100.0)
    q, k = torch.randn(8), torch.randn(8)
    rows_q = rotary.rotate(q.expand(1, 12, 1, 8))[0, :, 0]
    rows_k = rotary.rotate(k.expand(1, 12, 1, 8))[0, :, 0]
    torch.testing.assert_close(rows_q[0], q)
    torch.testing.assert_close(rows_q[3] @ rows_k[1], rows_q[9] @ rows_k[7])


def test_cross_entropy_is_a_sum_over_the_mask():
    logits, labels = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    mask = torch.tensor([[True, False, True], [False, False, True]])
    expected = -sum(logits.log_softmax(-1)[i, j, labels[i, j]] for i, j in mask.nonzero().tolist())
    torch.testing.assert_close(cross_entropy_sum(logits, labels, mask), expected)
    assert cross_entropy_sum(logits, labels, torch.zeros_like(mask)) == 0


def test_attention_is_causal_and_masks_nothing_else():
    config = small_config().model
    model = DecoderStage(config, range(config.num_layers))
    initialize_(dict(model.named_parameters()), config, seed=0)
    tokens = torch.randint(config.vocab_size, (1, config.seq_length))
    loss_at = []
    for changed in (tokens, torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % config.vocab_size], 1)):
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, :-1] = True
        loss_at.append(model(None, Microbatch(changed, tokens, mask)).item())
    assert loss_at[0] == loss_at[1], "an earlier position sees a later token"


def test_stages_put_together_are_the_whole_model_with_the_same_weights():
    config = small_config().model
    whole = DecoderStage(config, range(config.num_layers))
    initialize_(dict(whole.named_parameters()), config, seed=5)
    stages = [DecoderStage(config, layers) for layers in partition_layers(config, num_stages=3)]
    for stage in stages:
        initialize_(dict(stage.named_parameters()), config, seed=5)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    tokens = torch.randint(config.vocab_size, (2, config.seq_length))
    microbatch = Microbatch(tokens, tokens.roll(-1), torch.ones_like(tokens, dtype=torch.bool))
    x = None
    for stage in stages:
        x = stage(x, microbatch)
    torch.testing.assert_close(x, whole(None, microbatch), rtol=0, atol=0)


def test_initial_weights_are_those_of_any_dtype_and_differ_by_name_and_seed():
    config = small_config().model
    first, second, other = (DecoderStage(config, range(4)) for _ in range(3))
    initialize_(dict(first.named_parameters()), config, seed=1)
    second = second.to(torch.float32)
    initialize_(dict(second.named_parameters()), config, seed=1)
    initialize_(dict(other.named_parameters()), config, seed=2)
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b.double(), rtol=0, atol=0)
        assert a.dim() == 1 or not torch.equal(a, c)
    query = first.layers["1"].attention.query.weight
    assert not torch.equal(query, first.layers["2"].attention.query.weight)
    assert query.std().item() == pytest.approx(config.init_std, rel=0.2)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_layers_are_dealt_as_evenly_as_can_be(num_stages):
    from itertools import combinations, pairwise

    config = small_config(model__vocab_size=400).model

    def largest(cuts):
        bounds = [0, *cuts, config.num_layers]
        costs = [sum(layer_cost(config, i) for i in range(a, b)) for a, b in pairwise(bounds)]
        costs[-1] += head_cost(config)
        return max(costs)

    assigned = partition_layers(config, num_stages=num_stages)
    assert [i for r in assigned for i in r] == list(range(config.num_layers))
    assert all(len(r) > 0 for r in assigned)
    best = min(largest(cuts) for cuts in combinations(range(1, config.num_layers), num_stages - 1))
    assert largest([r.start for r in assigned[1:]]) == pytest.approx(best)


def test_a_copy_of_a_tied_model_stays_tied():
    config = small_config(model__tie_embeddings=True).model
    model = copy.deepcopy(DecoderStage(config, range(config.num_layers)))
    assert model.head.weight is model.embedding.weight
    assert sum("embedding" in name for name, _ in model.named_parameters()) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_equals_torchs_forward_and_backward(dtype):
    """In bfloat16: computed in float32, so within a rounding of the result."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 16, generator=generator, dtype=DOUBLE).to(dtype).requires_grad_()
    norm = RMSNorm(16, eps=0.1).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(16, generator=generator, dtype=DOUBLE))
    probe = torch.randn(2, 5, 16, generator=generator, dtype=DOUBLE).to(dtype)
    exact = torch.float64 if dtype is DOUBLE else torch.float32
    expected = F.rms_norm(x.to(exact), (16,), norm.weight.to(exact), 0.1).to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip(
        (norm(x), *torch.autograd.grad((norm(x) * probe).sum(), (x, norm.weight))),
        (expected, *torch.autograd.grad((expected * probe).sum(), (x, norm.weight))),
        strict=True,
    ):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_initial_parts_are_parts_of_the_whole_and_no_two_are_equal(sequence_parallel):
    """At every rank of a layout; experts, layers and projections all differ."""
    config = small_config(model__vocab_size=101).model
    whole = DecoderStage(config, range(config.num_layers))
    initialize_(dict(whole.named_parameters()), config, seed=3)
    weights = {name: p.detach() for name, p in whole.named_parameters()}
    layout = ParallelDims(pipeline=1, data=2, expert=2, tensor=2)
    for rank in range(layout.world_size):
        groups = {
            axis: RankGroup(None, layout.coordinate(rank, axis), getattr(layout, axis)) for axis in ("tensor", "expert")
        }
        splits = ModelParallelGroups(TensorParallel(groups["tensor"], sequence_parallel), groups["expert"])
        part = DecoderStage(config, range(config.num_layers), splits)
        parts = {
            name: sharding_of(name, sequence_parallel=sequence_parallel).local_ranges(w.shape, layout, rank=rank)
            for name, w in weights.items()
        }
        initialize_(
            dict(part.named_parameters()),
            config,
            seed=3,
            shapes={n: tuple(w.shape) for n, w in weights.items()},
            parts=parts,
        )
        for name, parameter in part.named_parameters():
            expected = weights[name][tuple(slice(r.start, r.stop) for r in parts[name])]
            assert torch.equal(parameter.detach(), expected), (rank, name)
    matrices = [m for w in weights.values() if w.dim() > 1 for m in (w if w.dim() == 3 else [w])]
    firsts = [tuple(m.flatten()[:4].tolist()) for m in matrices]
    assert len(set(firsts)) == len(firsts)
