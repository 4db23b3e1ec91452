"""The whole model against a forward written from the papers' formulas in numpy, token by token."""

import numpy as np
import pytest
import torch

from megaasync.data.microbatches import Microbatch
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import DecoderStage
from tests.support.configs import small_config


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rotate(x, position, theta):
    """Pairs (i, i + K/2) turn by position / theta^(2i/K)."""
    half = len(x) // 2
    turned = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        turned[i] = a * np.cos(angle) - b * np.sin(angle)
        turned[i + half] = b * np.cos(angle) + a * np.sin(angle)
    return turned


def attention(x, w, config):
    length, size = len(x), config.hidden_size // config.num_heads
    q, k, v = (x @ w[f"{name}.weight"].T for name in ("query", "key", "value"))
    if config.qk_norm:
        norms = {"query": w["query_norm.weight"], "key": w["key_norm.weight"]}
        q, k = (
            rms_norm(x.reshape(length, -1, size), norms[name], config.norm_eps).reshape(length, -1)
            for name, x in (("query", q), ("key", k))
        )
    out = np.zeros((length, config.num_heads * size))
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        mine, theirs = slice(head * size, (head + 1) * size), slice(shared * size, (shared + 1) * size)
        keys = np.stack([rotate(k[j, theirs], j, config.rope_theta) for j in range(length)])
        for i in range(length):
            scores = keys[: i + 1] @ rotate(q[i, mine], i, config.rope_theta) / np.sqrt(size)
            out[i, mine] = softmax(scores) @ v[: i + 1, theirs]
    return out @ w["output.weight"].T


def swiglu(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(x, w, config):
    out = np.zeros_like(x)
    for i, token in enumerate(x):
        p = softmax(w["router.weight"] @ token)
        chosen = np.argsort(-p)[: config.moe.top_k]
        for e in chosen:
            y = swiglu(token, w["experts.gate"][e], w["experts.up"][e], w["experts.down"][e])
            out[i] += p[e] / p[chosen].sum() * y
        out[i] += swiglu(token, *(w[f"shared.{n}.weight"] for n in ("gate", "up", "down")))
    return out


def part(weights, prefix):
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def loss_sum(weights, tokens, labels, mask, config):
    total = 0.0
    head = weights["embedding.weight" if config.tie_embeddings else "head.weight"]
    for sequence, targets, valid in zip(tokens, labels, mask, strict=True):
        x = weights["embedding.weight"][sequence]
        for layer in range(config.num_layers):
            w = part(weights, f"layers.{layer}.")
            x = x + attention(rms_norm(x, w["attention_norm.weight"], config.norm_eps), part(w, "attention."), config)
            y, mlp = rms_norm(x, w["mlp_norm.weight"], config.norm_eps), part(w, "mlp.")
            dense = config.moe is None or layer < config.moe.first_dense_layers
            x = x + (
                swiglu(y, *(mlp[f"{n}.weight"] for n in ("gate", "up", "down"))) if dense else experts(y, mlp, config)
            )
        p = softmax(rms_norm(x, weights["final_norm.weight"], config.norm_eps) @ head.T)
        total -= np.log(p[np.arange(len(targets)), targets])[valid].sum()
    return total


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"model__moe": None, "model__tie_embeddings": True},
        # an epsilon that matters, a rotary base that turns fast, one head each
        {"model__norm_eps": 0.3, "model__rope_theta": 3.0, "model__num_heads": 2, "model__num_kv_heads": 1},
        {"model__qk_norm": True, "model__norm_eps": 0.3},
    ],
    ids=["moe", "dense tied", "other constants", "query and key norms"],
)
def test_the_model_is_the_formulas(overrides):
    config = small_config(**overrides).model
    torch.set_default_dtype(torch.float64)
    try:
        model = DecoderStage(config, range(config.num_layers))
    finally:
        torch.set_default_dtype(torch.float32)
    initialize_(dict(model.named_parameters()), config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, and large enough for every nonlinearity to bend
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    tokens = torch.randint(config.vocab_size, (2, config.seq_length), generator=generator)
    labels = torch.randint(config.vocab_size, (2, config.seq_length), generator=generator)
    mask = torch.rand((2, config.seq_length), generator=generator) < 0.7
    ours = model(None, Microbatch(tokens, labels, mask)).item()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    assert ours == pytest.approx(loss_sum(weights, tokens.numpy(), labels.numpy(), mask.numpy(), config), rel=1e-12)


def test_projections_into_the_residual_stream_start_smaller():
    config = small_config(model__hidden_size=64, model__ffn_hidden_size=96, model__moe__ffn_hidden_size=64).model
    model = DecoderStage(config, range(config.num_layers))
    initialize_(dict(model.named_parameters()), config, seed=1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        residual = name.endswith(("output.weight", "down.weight", "experts.down"))
        expected = config.init_std / (8**0.5 if residual else 1)  # sqrt(2 x 4 layers)
        assert parameter.std().item() == pytest.approx(expected, rel=0.15), name
