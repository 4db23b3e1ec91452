"""Bytes that one microbatch's forward keeps for its backward, by formula: what autograd saves in each layer.

`tools/measure_plan.py` counts the same by running the layers on fake tensors.
"""

from dataclasses import dataclass

from megaasync.config.schema import ModelConfig
from megaasync.models.transformer import is_moe_layer

_INDEX = 8  # bytes of an int64


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """What the bytes depend on besides the model.

    Attributes:
        tokens: of a microbatch.
        compute, exact: bytes of a number in the run's dtype, and in at least float32.
        tensor: ranks that share each layer.
        sequence_parallel: between layers, each has a part of the sequence.
        expert: ranks that share the experts.
    """

    tokens: int
    compute: int
    exact: int
    tensor: int
    sequence_parallel: bool
    expert: int

    @property
    def between(self) -> float:
        """Tokens that a rank holds between layers."""
        return self.tokens / self.tensor if self.sequence_parallel else self.tokens


def _norm(config: ModelConfig, sizes: ActivationSizes) -> float:
    return sizes.between * (config.hidden_size * sizes.compute + sizes.exact)


def _swiglu(width: int, sizes: ActivationSizes) -> float:
    """Gate, its silu, up and their product."""
    return 4 * sizes.tokens * width / sizes.tensor * sizes.compute


def _attention(config: ModelConfig, sizes: ActivationSizes) -> float:
    head_size = config.hidden_size // config.num_heads
    rows = (2 * config.num_heads + 2 * config.num_kv_heads) * head_size  # queries and outputs, keys and values
    heads = rows * sizes.compute + config.num_heads * sizes.exact  # with a log-sum per head
    return sizes.tokens * (config.hidden_size * sizes.compute + heads / sizes.tensor)


def _moe(config: ModelConfig, sizes: ActivationSizes) -> float:
    moe, hidden = config.moe, config.hidden_size
    is_wide = sizes.compute < sizes.exact  # the router works on a copy
    per_token = (hidden + moe.num_experts) * sizes.exact + moe.top_k * (_INDEX + sizes.exact) + sizes.exact
    per_choice = 2 * hidden * sizes.compute + 4 * moe.ffn_hidden_size * sizes.compute + 2 * _INDEX
    per_choice += sizes.compute if is_wide else 0
    if sizes.expert > 1:
        per_choice += 2 * _INDEX
    total = sizes.tokens / sizes.tensor * (per_token + moe.top_k * per_choice)
    if is_wide:
        total += moe.num_experts * hidden * sizes.exact
    if moe.num_shared_experts:
        total += _swiglu(moe.num_shared_experts * moe.ffn_hidden_size, sizes)
        if is_wide or sizes.tensor > 1:  # else it is the router's own input
            total += sizes.tokens * hidden * sizes.compute
    return total


def layer_bytes(config: ModelConfig, layer: int, sizes: ActivationSizes) -> float:
    """Of one layer and one microbatch on one rank."""
    total = 2 * _norm(config, sizes) + _attention(config, sizes)
    if is_moe_layer(config, layer):
        return total + _moe(config, sizes)
    return total + sizes.tokens * config.hidden_size * sizes.compute + _swiglu(config.ffn_hidden_size, sizes)


def stage_bytes(config: ModelConfig, layers: range, sizes: ActivationSizes) -> int:
    """Of one stage and one microbatch on one rank; the last stage's are with the head and its probabilities."""
    total = sum(layer_bytes(config, layer, sizes) for layer in layers)
    if layers.start == 0:
        total += sizes.tokens * _INDEX
    if layers.stop == config.num_layers:
        total += _norm(config, sizes) + sizes.tokens * config.hidden_size * sizes.compute
        total += sizes.tokens * config.vocab_size / sizes.tensor * sizes.exact
    return round(total)


def head_workspace(config: ModelConfig, sizes: ActivationSizes) -> int:
    """Bytes that the last stage needs for a moment: logits in both precisions and their gradients."""
    return round(2 * sizes.tokens * config.vocab_size / sizes.tensor * (sizes.compute + sizes.exact))
