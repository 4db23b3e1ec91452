"""Work per token by one stated formula, the same at every layout.

Multiply-adds of every matrix product count twice, attention is causal (each token meets half the sequence on average),
of the routed experts a token counts its top_k, the backward is twice the forward; norms, the embedding's lookup and
recomputation do not count. Model FLOPs utilisation (MFU) is this over what the devices could do at their peak.
"""

import math

from megaasync.config.schema import ModelConfig
from megaasync.models.partition import head_cost, layer_cost

# Dense bfloat16 matrix products by NVIDIA's data sheets, in 1e12 operations per second, by a part of the device's name.
PEAK_TFLOPS = {"A100": 312.0, "H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "H800": 989.0, "B200": 2250.0}


def forward_flops(config: ModelConfig, layers: range, *, with_head: bool) -> float:
    """Floating-point operations per token of a forward through some layers."""
    products = sum(layer_cost(config, layer) for layer in layers)
    return 2 * (products + (head_cost(config) if with_head else 0.0))


def flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations per token of forward and backward through the whole model."""
    return 3 * forward_flops(config, range(config.num_layers), with_head=True)


def peak_tflops(device_name: str) -> float | None:
    """Peak of a device in bfloat16; None for one that is not in the table."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def utilisation(config: ModelConfig, *, tokens_per_second: float, ranks: int, device_name: str) -> tuple[float, float]:
    """(1e12 operations per second and rank, share of the device's peak or nan)."""
    reached = tokens_per_second * flops_per_token(config) / ranks / 1e12
    peak = peak_tflops(device_name)
    return reached, reached / peak if peak else math.nan
