"""Layers to stages: contiguous runs that keep the most expensive stage as cheap as it can be."""

import itertools
from collections.abc import Sequence

from megaasync.config.schema import ModelConfig
from megaasync.models.transformer import is_moe_layer


def layer_cost(config: ModelConfig, layer: int) -> float:
    """Multiply-adds of one layer's forward, per token."""
    hidden = config.hidden_size
    head_size = hidden // config.num_heads
    projections = hidden * head_size * (2 * config.num_heads + 2 * config.num_kv_heads)
    # causal: each token looks at half the sequence on average, once for scores and once for values
    mixing = config.seq_length * hidden
    if is_moe_layer(config, layer):
        moe = config.moe
        width = (moe.top_k + moe.num_shared_experts) * moe.ffn_hidden_size
        return projections + mixing + 3 * hidden * width + hidden * moe.num_experts
    return projections + mixing + 3 * hidden * config.ffn_hidden_size


def head_cost(config: ModelConfig) -> float:
    """Multiply-adds of the head's forward, per token."""
    return config.hidden_size * config.vocab_size


def embedding_cost(config: ModelConfig) -> float:
    """Operations of the embedding per token: it copies a row, one operation per element."""
    return config.hidden_size


def partition_layers(
    config: ModelConfig, *, num_stages: int, layers_per_stage: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Layers of each stage, embedding and head counted with the ends, so that the largest stage cost is smallest.

    Args:
        config: shape of the model.
        num_stages: at most config.num_layers; every stage gets a layer.
        layers_per_stage: how many each gets, if that is not to be found.

    Returns:
        One range of layer numbers per stage. Among equals, later stages get fewer layers.
    """
    if layers_per_stage is not None:
        ends = list(itertools.accumulate(layers_per_stage, initial=0))
        return tuple(range(first, end) for first, end in itertools.pairwise(ends))
    costs = [layer_cost(config, layer) for layer in range(config.num_layers)]
    costs[0] += embedding_cost(config)
    costs[-1] += head_cost(config)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[n][k]: smallest possible largest cost of the first n layers on k stages, and where the last one starts
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for stages in range(1, num_stages + 1):
        for layers in range(stages, config.num_layers + 1):
            best[layers, stages] = min(
                (max(best[start, stages - 1][0], total[layers] - total[start]), -start)
                for start in range(stages - 1, layers)
                if (start, stages - 1) in best
            )
    cuts = [config.num_layers]
    for stages in range(num_stages, 0, -1):
        cuts.append(-best[cuts[-1], stages][1])
    cuts.reverse()
    return tuple(range(first, end) for first, end in itertools.pairwise(cuts))
