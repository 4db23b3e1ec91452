"""Two layers of the run's widths, computed by a backend and by torch, before the backend is trusted with the run."""

from dataclasses import replace

import torch
from torch import Tensor

from megaasync.config.schema import ModelConfig
from megaasync.data.microbatches import Microbatch
from megaasync.kernels.backend import Kernels
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import DecoderStage
from megaasync.nn.layer_context import LayerContext
from megaasync.nn.precision import at_least_float32, default_dtype

_SEQUENCES, _TOKENS, _VOCABULARY = 2, 128, 512
# of gradients, relative in their norm; products of FP8 keep three bits of a factor
_TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-3, torch.float64: 1e-8}
_TOLERANCE_FP8 = 0.3


def _small(model: ModelConfig) -> ModelConfig:
    """Two layers of a model, the first one dense; every token goes to every expert, so that no rounding moves one."""
    moe = model.moe and replace(model.moe, num_experts=model.moe.top_k, first_dense_layers=1, capacity_factor=None)
    return replace(
        model, num_layers=2, moe=moe, seq_length=min(model.seq_length, _TOKENS),
        vocab_size=min(model.vocab_size, _VOCABULARY),
    )  # fmt: skip


def _loss_and_gradients(
    kernels: Kernels, model: ModelConfig, microbatch: Microbatch, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    with default_dtype(dtype), device:
        stage = DecoderStage(model, range(model.num_layers), context=LayerContext(kernels))
    exact = at_least_float32(dtype)
    weights = {name: parameter.detach().to(exact) for name, parameter in stage.named_parameters()}
    initialize_(weights, model, seed=0)
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for name, parameter in stage.named_parameters():
        parameter.data.copy_(weights[name])
        parameter.main_grad = sums[name]
    loss = stage(None, microbatch)
    loss.backward()
    for name, parameter in stage.named_parameters():
        if parameter.grad is not None:  # what autograd has added itself
            sums[name] += parameter.grad
    return loss.detach(), sums


def difference_of(
    kernels: Kernels, reference: Kernels, model: ModelConfig, *, dtype: torch.dtype, device: torch.device, is_fp8: bool
) -> str | None:
    """What a backend computes otherwise than the reference, in words; None if nothing.

    Args:
        kernels: the backend.
        reference: torch's.
        model: of the run; two layers of its widths are made.
        dtype: of the run.
        device: of the rank.
        is_fp8: the backend's products are in FP8.
    """
    small = _small(model)
    shape = _SEQUENCES, small.seq_length
    tokens_BS = torch.randint(small.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    microbatch = Microbatch(tokens_BS, tokens_BS.roll(-1, dims=1), torch.ones_like(tokens_BS, dtype=torch.bool))
    how = {"dtype": dtype, "device": device}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # a backend may draw weights
        loss, sums = _loss_and_gradients(kernels, small, microbatch, **how)
    expected_loss, expected = _loss_and_gradients(reference, small, microbatch, **how)
    tolerance = _TOLERANCE_FP8 if is_fp8 else _TOLERANCE[dtype]
    gaps = {name: ((sums[name] - total).norm() / total.norm()).item() for name, total in expected.items()}
    gaps["the loss"] = ((loss - expected_loss).abs() / expected_loss.abs()).item()
    worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else float("inf"))
    if gaps[worst] <= tolerance:
        return None
    what = worst if worst == "the loss" else f"the gradient of {worst}"
    return f"{what} differs from torch's by {gaps[worst]:.2g} of its size, and {tolerance:g} is allowed"
