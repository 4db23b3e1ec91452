"""Router and dispatcher against loops over tokens: choices, weights, loads, the three losses, capacity, masks."""

import math

import pytest
import torch

from megaasync.nn.moe import MoE
from megaasync.nn.router import Router
from megaasync.nn.token_dispatcher import TokenDispatcher
from megaasync.optim.expert_balance import ExpertBalance
from tests.support.configs import moe_config

EXPERTS, HIDDEN = 5, 8


@pytest.fixture(autouse=True)
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_router(**overrides):
    torch.manual_seed(3)
    router = Router(moe_config(num_experts=EXPERTS, **overrides), hidden_size=HIDDEN)
    torch.nn.init.normal_(router.weight)
    router.fractions_E.copy_(torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15]))
    return router


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 6, HIDDEN, generator=generator, requires_grad=True)
    mask = torch.rand(3, 6, generator=generator) < 0.6
    mask[1] = False  # a sequence without a valid token
    return x, mask


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_choices_weights_and_loads(score, normalize):
    router = make_router(top_k=2, score_function=score, normalize_top_k=normalize, bias_update_rate=0.1)
    router.bias_E.copy_(torch.tensor([0.0, 5.0, 0.0, 0.0, -5.0]))  # expert 1 always, expert 4 never
    x, mask = batch()
    routing = router(x, mask)
    counts = [0] * EXPERTS
    for token, valid, weights, experts in zip(
        x.flatten(0, 1), mask.flatten(), routing.weights_TK, routing.experts_TK, strict=True
    ):
        logits = router.weight @ token
        scores = logits.softmax(0) if score == "softmax" else 1 / (1 + (-logits).exp())
        chosen = sorted(range(EXPERTS), key=lambda e: -(scores[e] + router.bias_E[e]))[:2]
        assert experts.tolist() == chosen
        expected = scores[chosen]  # the bias has no part in the weights
        torch.testing.assert_close(weights, expected / expected.sum() if normalize else expected)
        for expert in chosen:
            counts[expert] += int(valid)
    scores = (x.flatten(0, 1) @ router.weight.T).softmax(1) if score == "softmax" else None
    scores = torch.sigmoid(x.flatten(0, 1) @ router.weight.T) if scores is None else scores
    chosen = scores.gather(1, routing.experts_TK)
    expected = chosen / chosen.sum(1, keepdim=True) if normalize else chosen
    for column in (0, 1):  # the gradient of each weight, through the normalisation too
        ours, by_hand = (
            torch.autograd.grad(weights[:, column].square().sum(), router.weight, retain_graph=True)[0]
            for weights in (routing.weights_TK, expected)
        )
        torch.testing.assert_close(ours, by_hand)
    assert routing.counts_E.tolist() == counts
    assert counts[4] == 0
    assert counts[1] == int(mask.sum())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", ["sequence_balance_loss", "global_balance_loss", "z_loss"])
def test_losses_are_the_papers_formulas_summed_over_valid_tokens(score, name):
    router = make_router(top_k=2, score_function=score, **{name: 0.7})
    x, mask = batch()
    routing = router(x, mask)
    expected = 0.0
    for sequence, valid, experts in zip(x, mask, routing.experts_TK.view(3, 6, 2), strict=True):
        logits = sequence @ router.weight.T
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        shares = scores / scores.sum(-1, keepdim=True)
        tokens = int(valid.sum())
        if name == "z_loss":
            expected += sum(logits[i].exp().sum().log() ** 2 for i in range(6) if valid[i])
        elif name == "global_balance_loss":
            expected += sum(EXPERTS * (router.fractions_E @ shares[i]) for i in range(6) if valid[i])
        elif tokens:
            # alpha sum_e f_e P_e, for a sequence, times its tokens
            for e in range(EXPERTS):
                f = EXPERTS / (2 * tokens) * sum(int(e in experts[i]) for i in range(6) if valid[i])
                expected += tokens * f * sum(shares[i, e] for i in range(6) if valid[i]) / tokens
    expected = 0.7 * expected
    torch.testing.assert_close(routing.losses_3.sum(), expected)
    ours = torch.autograd.grad(routing.losses_3.sum(), (x, router.weight))
    theirs = torch.autograd.grad(expected, (x, router.weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_loss_beside_the_activation_gets_a_gradient_of_one():
    torch.manual_seed(0)
    moe = MoE(moe_config(num_experts=EXPERTS, z_loss=0.3), hidden_size=HIDDEN)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, mask = batch()
    probe = torch.randn(3, 6, HIDDEN)
    (ours,) = torch.autograd.grad((moe(x, mask) * probe).sum(), moe.router.weight)
    routing = moe.router(x, mask)
    dispatched = moe._dispatcher.dispatch(x.flatten(0, 1), routing.experts_TK)
    y = moe._dispatcher.combine(moe.experts(*_rows(dispatched)), dispatched, routing.weights_TK)
    total = ((y.view_as(x) + moe.shared(x)) * probe).sum() + routing.losses_3.sum()
    (theirs,) = torch.autograd.grad(total, moe.router.weight)
    torch.testing.assert_close(ours, theirs)


def _rows(dispatched):
    return dispatched.rows_RD, dispatched.counts_E


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
def test_an_expert_over_its_capacity_drops_its_latest_tokens(factor):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, HIDDEN, generator=generator, requires_grad=True)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(12)])
    experts[:8, 0], experts[:8, 1] = 0, 3  # two busy experts
    weights = torch.rand(12, 2, generator=generator)
    dispatcher = TokenDispatcher(num_experts=EXPERTS, capacity_factor=factor)
    dispatched = dispatcher.dispatch(x, experts)
    scale = torch.arange(1.0, EXPERTS + 1).repeat_interleave(dispatched.counts_E)
    y = dispatcher.combine(dispatched.rows_RD * scale.unsqueeze(1), dispatched, weights)
    capacity = math.ceil(factor * 24 / EXPERTS)
    taken, expected = [0] * EXPERTS, []
    for i in range(12):
        row = torch.zeros(HIDDEN)
        for k in range(2):
            expert = int(experts[i, k])
            if taken[expert] < capacity:
                taken[expert] += 1
                row = row + weights[i, k] * (expert + 1) * x[i]
        expected.append(row)
    assert dispatched.counts_E.tolist() == taken
    torch.testing.assert_close(y, torch.stack(expected))
    probe = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad((y * probe).sum(), x)[0],
        torch.autograd.grad((torch.stack(expected) * probe).sum(), x)[0],
    )


def test_padding_has_no_part_in_loads_and_losses():
    """Half of a batch padded: counts and losses are those of the other half alone."""
    router = make_router(top_k=2, sequence_balance_loss=1.0, global_balance_loss=1.0, z_loss=1.0)
    x, _ = batch()
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[:, :3] = True
    padded, alone = router(x, mask), router(x[:, :3], mask[:, :3])
    assert padded.counts_E.tolist() == alone.counts_E.tolist()
    torch.testing.assert_close(padded.losses_3, alone.losses_3)


def test_a_masked_microbatch_contributes_nothing():
    router = make_router(sequence_balance_loss=1.0, global_balance_loss=1.0, z_loss=1.0)
    x, mask = batch()
    routing = router(x, torch.zeros_like(mask))
    assert routing.counts_E.sum() == 0
    assert routing.losses_3.tolist() == [0.0, 0.0, 0.0]
    assert torch.autograd.grad(routing.losses_3.sum(), x)[0].abs().max() == 0


def test_biases_and_fractions_follow_the_loads_and_belong_to_versions():
    """Busy experts get less bias; both buffers go to the slot of the version that the step writes, and to no other."""
    slots = [[make_router(bias_update_rate=0.01) for _ in range(2)] for _ in range(2)]
    for slot in slots:
        for router in slot:
            router.fractions_E.fill_(1 / EXPERTS)
    balance = ExpertBalance(slots, bias_update_rate=0.01)
    x, mask = batch()
    with balance.counting(0):
        routings = [router(x, mask) for router in slots[0]]
        routings.append(slots[0][1](x, mask))
    slots[1][0](x, mask)  # an evaluation: nothing counts it
    counts = torch.stack([routings[0].counts_E, 2 * routings[1].counts_E]).double()
    assert balance.stats(0)[:2].tolist() == pytest.approx([(counts.amax(1) / counts.mean(1)).sum().item(), 2])
    balance.absorb(0, version=1)
    for layer, router in enumerate(slots[1]):
        expected = 0.01 * torch.sign(counts[layer].mean() - counts[layer])
        torch.testing.assert_close(router.bias_E, expected)
        torch.testing.assert_close(router.fractions_E, counts[layer] / counts[layer].sum())
        assert slots[0][layer].bias_E.abs().max() == 0
    with balance.counting(1):
        slots[1][0](x, torch.zeros_like(mask))
    before = balance.fractions_LE.clone()
    balance.absorb(1, version=2)
    torch.testing.assert_close(balance.fractions_LE, before)  # no valid token: they stay
    assert balance.fractions_LE.isfinite().all()
