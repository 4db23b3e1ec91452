"""The delayed training loop written by hand, on one process: docs/method.md in the plainest form.

It imports nothing of megaasync's optim or pipeline. Faults can be put in on purpose.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch.func import functional_call

from megaasync.config import Config
from megaasync.config.schema import Taylor
from megaasync.data.microbatches import Microbatch, TokenSequences, TrainingMicrobatches
from megaasync.data.synthetic import MarkovSource
from megaasync.models.initialize import initialize_
from megaasync.models.partition import partition_layers
from megaasync.models.transformer import DecoderStage
from megaasync.nn.router import Routing

Tensors = dict[str, torch.Tensor]


@dataclass
class Reference:
    """Losses, global gradient norms and final weights; z and published weights after each update; the model."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, np.ndarray]
    z: list[Tensors]
    x: list[Tensors]
    model: DecoderStage
    buffers: list[Tensors]  # biases and fractions of the routers by version


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    x = matrix / matrix.norm()
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def is_muon_matrix(name: str, weight: torch.Tensor, config: Config) -> bool:
    excluded = ("embedding" in name) or ("head" in name) or ("router" in name)
    return config.optimizer.name == "muon" and weight.dim() >= 2 and not excluded


def direction(name: str, g: torch.Tensor, state: Tensors, t: int, config: Config) -> torch.Tensor:
    o = config.optimizer
    if o.name == "sgd":
        return g
    if is_muon_matrix(name, g, config):
        state["m"] = o.momentum * state.get("m", 0) + (1 - o.momentum) * g
        n = (1 - o.momentum) * g + o.momentum * state["m"]
        matrices = n if n.dim() == 3 else n[None]
        scale = 0.2 * math.sqrt(max(g.shape[-2:]))
        return torch.stack([scale * newton_schulz(matrix, o.newton_schulz_steps) for matrix in matrices]).view(g.shape)
    b1, b2 = o.betas
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    return (state["m"] / (1 - b1**t)) / ((state["v"] / (1 - b2**t)).sqrt() + o.eps)


def learning_rate(k: int, config: Config) -> float:
    warmup, steps, low = config.train.warmup_steps, config.train.steps, config.train.final_lr_ratio
    if k < warmup:
        return config.optimizer.lr * (k + 1) / warmup
    if config.train.lr_schedule == "constant":
        return config.optimizer.lr
    turn = math.cos(math.pi * (k - warmup) / max(steps - 1 - warmup, 1))
    return config.optimizer.lr * (low + (1 - low) * (1 + turn) / 2)


def stage_of_parameter(config: Config, num_stages: int) -> dict[str, int]:
    """Which of the stages holds each parameter; a tied embedding counts as the first's."""
    stages = {}
    for index, layers in reversed(list(enumerate(partition_layers(config.model, num_stages=num_stages)))):
        for name, _ in DecoderStage(config.model, layers).named_parameters():
            stages[name] = index
    return stages


def phase_of(t: int, config: Config) -> tuple[int, int, bool]:
    """(first step, end, has a delay) of the phase that batch t is in."""
    start, total = config.schedule.sync_start_steps, config.train.steps
    cooldown = total - config.schedule.sync_cooldown_steps
    if t < start:
        return 0, start, False
    return (start, cooldown, True) if t < cooldown else (cooldown, total, False)


class Counts:
    """Choices of each router in a batch, and what follows from them."""

    def __init__(self, routers: dict[str, torch.nn.Module]) -> None:
        self._names = list(routers)
        self._counts: dict[str, torch.Tensor] = dict.fromkeys(routers, torch.zeros(()))
        for layer, router in enumerate(routers.values()):
            router.observer, router.layer = self, layer

    def add(self, layer: int, routing: Routing) -> None:
        self._counts[self._names[layer]] = self._counts[self._names[layer]] + routing.counts_E

    def follow(
        self, name: str, bias: torch.Tensor, fractions: torch.Tensor, config: Config
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bias and fractions after the batch."""
        counts, rate = self._counts[name].double(), config.model.moe.bias_update_rate
        return bias + rate * torch.sign(counts.mean() - counts), counts / counts.sum()


def model_and_data(config: Config) -> tuple[DecoderStage, TrainingMicrobatches]:
    """The whole model in float64 with its initial weights, and the microbatches."""
    torch.set_default_dtype(torch.float64)
    model = DecoderStage(config.model, range(config.model.num_layers))
    torch.set_default_dtype(torch.float32)
    initialize_(dict(model.named_parameters()), config.model, seed=config.train.seed)
    chain = MarkovSource(vocab_size=config.model.vocab_size, branching=config.data.branching, seed=config.train.seed)
    tokens = chain.tokens(num_tokens=config.data.num_tokens, stream=0)
    sequences = TokenSequences(
        tokens, seq_length=config.model.seq_length, vocab_size=config.model.vocab_size, name="reference"
    )
    data = TrainingMicrobatches(
        sequences,
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=config.num_microbatches,
        seed=config.train.seed,
        device=torch.device("cpu"),
    )
    return model, data


def loss_and_gradients(
    model: DecoderStage, weights: Tensors, buffers: Tensors, batch: list[Microbatch], *, tie_weights: bool
) -> tuple[torch.Tensor, Tensors]:
    """Means over the batch's tokens; the routers' losses are sums over tokens, and count in the gradients."""
    inputs = {**weights, **buffers}
    loss = sum(functional_call(model, inputs, (None, item), tie_weights=tie_weights) for item in batch)
    num_tokens = sum(item.mask_BS.numel() for item in batch)
    gradients = torch.autograd.grad(loss, weights.values())
    return loss / num_tokens, {name: g / num_tokens for name, g in zip(weights, gradients, strict=True)}


def named_buffers(of_routers: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Tensors:
    """Biases and fractions by their names in the model."""
    kinds = ("bias_E", "fractions_E")
    return {f"{name}.{kind}": item for name, pair in of_routers.items() for kind, item in zip(kinds, pair)}


def clip_(gradients: Tensors, stages: dict[str, int], largest: float) -> None:
    """By the norm of all gradients of a stage; all are of stage 0 where clipping is global."""
    for stage in set(stages.values()):
        names = [name for name in gradients if stages[name] == stage]
        norm = math.sqrt(sum(gradients[name].square().sum().item() for name in names))
        for name in names:
            gradients[name] = gradients[name] * min(1.0, largest / norm)


def compensate_(gradients: Tensors, states: dict[str, Tensors], correction: Taylor, moved: Tensors) -> None:
    """DC-ASGD: by how far the newest weights are from those that the gradients were taken at."""
    for name, gradient in gradients.items():
        strength = torch.tensor(correction.strength, dtype=torch.float64)
        if correction.adaptive:
            states[name]["dc"] = 0.95 * states[name].get("dc", 0) + 0.05 * gradient**2
            strength = strength / (states[name]["dc"] + 1e-7).sqrt()
        gradients[name] = gradient + strength * gradient**2 * moved[name]


def reference_run(
    config: Config,
    *,
    delay: int | list[int],
    clips_by_stage: bool = False,
    head_delay: int | None = None,
    fault: str | None = None,
    skipped: Collection[int] = (),
) -> Reference:
    """A run by hand.

    Args:
        config: of the run; schedule name and layout are not looked at.
        delay: of every parameter, or one per stage.
        clips_by_stage: each stage's gradient is clipped by its own norm.
        head_delay: of the tied embedding where it is the head, if that is another one.
        fault: a deliberate mistake.
        skipped: batches whose gradients are left out: no update, and the version after them is z.
    """
    model, data = model_and_data(config)
    o, T = config.optimizer, config.train.steps
    error_feedback = config.correction.name == "error_feedback"
    z = {name: p.detach().clone() for name, p in model.named_parameters()}
    delays = [delay] if isinstance(delay, int) else delay
    stage_of = stage_of_parameter(config, len(delays))
    delay_of = {name: delays[stage_of[name]] for name in z}
    clip_stages = stage_of if clips_by_stage else dict.fromkeys(z, 0)
    if fault == "clip per stage":
        clip_stages = stage_of_parameter(config, 2)
    x = [dict(z)]  # x[v]: what version v publishes
    states: dict[str, Tensors] = {name: {} for name in z}
    routers = {name: module for name, module in model.named_modules() if hasattr(module, "fractions_E")}
    buffers = [{name: (r.bias_E.clone(), r.fractions_E.clone()) for name, r in routers.items()}]  # by version
    zs = [dict(z)]
    losses, norms = [], []
    for t in range(T):
        first, end, is_delayed = phase_of(t, config)
        weights = {
            name: x[max(t - delay_of[name], first) if is_delayed else t][name].clone().requires_grad_() for name in z
        }
        if head_delay is not None:
            weights["head.weight"] = x[max(t - head_delay, 0)]["embedding.weight"].clone().requires_grad_()
        used = {}
        for name in routers:
            version = max(t - delay_of[f"{name}.weight"], first) if is_delayed else t
            used[f"{name}.bias_E"], used[f"{name}.fractions_E"] = buffers[version][name]
        counts = Counts(routers)
        batch = [data.get(t, i) for i in range(config.num_microbatches)]
        loss, g = loss_and_gradients(model, weights, used, batch, tie_weights=head_delay is None)
        buffers.append({name: counts.follow(name, *buffers[-1][name], config) for name in routers})
        if head_delay is not None:
            g["embedding.weight"] = g["embedding.weight"] + g.pop("head.weight")
        losses.append(loss.item())
        norms.append(math.sqrt(sum(item.square().sum().item() for item in g.values())))
        clip_(g, clip_stages, config.train.clip_grad_norm or math.inf)
        if t in skipped:
            x.append(dict(z))
            zs.append(dict(z))
            continue
        if fault == "no settling" and max(delays) > 0 and t == T - 1:
            break
        if config.correction.name == "taylor":  # without a delay there is no difference of weights
            compensate_(g, states, config.correction, {name: x[-1][name] - w.detach() for name, w in weights.items()})
        new_x, count = {}, t + 1 - sum(step < t for step in skipped)
        is_handed_on = t == end - 1 < T - 1  # another phase starts from these weights
        for name in list(z):
            decay = 0.0 if z[name].dim() == 1 else o.weight_decay
            at = x[-1][name] if fault == "decay at x" else z[name]
            u = learning_rate(t, config) * (direction(name, g[name], states[name], count, config) + decay * at)
            z[name] = z[name] - u
            ahead = delay_of[name] if error_feedback and is_delayed and not is_handed_on else 0
            new_x[name] = z[name] - ahead * u
        x.append(new_x)
        zs.append(dict(z))
    named = [named_buffers(at) for at in buffers]
    return Reference(losses, norms, {name: w.numpy() for name, w in z.items()}, zs, x, model, named)


def validation_loss(reference: Reference, weights: Tensors, config: Config) -> float:
    """Mean loss of the validation stream's first sequences, taken one at a time."""
    chain = MarkovSource(vocab_size=config.model.vocab_size, branching=config.data.branching, seed=config.train.seed)
    length, total = config.model.seq_length, 0.0
    tokens = torch.from_numpy(chain.tokens(num_tokens=config.data.num_tokens // 10, stream=1)).long()
    for i in range(config.train.eval_sequences):
        row = tokens[None, i * length : i * length + length + 1]
        batch = Microbatch(row[:, :-1], row[:, 1:], torch.ones(1, length, dtype=torch.bool))
        total += functional_call(reference.model, weights, (None, batch)).item()
    return total / (config.train.eval_sequences * length)


def largest_gap(run_weights: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> float:
    """Largest difference of two sets of weights, relative to each tensor's size."""
    assert run_weights.keys() == weights.keys()
    return max(float(np.abs(run_weights[n] - w).max() / np.abs(w).max()) for n, w in weights.items())
