"""Work per token by one stated formula, the same at every layout.

Multiply-adds of every matrix product count twice, attention is causal (each token meets half the sequence on average),
of the routed experts a token counts its top_k, the backward is twice the forward; norms, the embedding's lookup and
recomputation do not count. Model FLOPs utilisation (MFU) is this over what the devices could do at their peak.
"""

from megaasync.config.schema import ModelConfig
from megaasync.models.partition import head_cost, layer_cost


def forward_flops(config: ModelConfig, layers: range, *, with_head: bool) -> float:
    """Floating-point operations per token of a forward through some layers."""
    products = sum(layer_cost(config, layer) for layer in layers)
    return 2 * (products + (head_cost(config) if with_head else 0.0))


def flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations per token of forward and backward through the whole model."""
    return 3 * forward_flops(config, range(config.num_layers), with_head=True)
