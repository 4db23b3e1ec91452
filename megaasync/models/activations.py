"""Bytes that one microbatch's forward keeps for its backward, by formula: what autograd saves in each layer.

`tools/bench/measure_plan.py` counts the same by running the layers on fake tensors.
"""

from dataclasses import dataclass, replace

from megaasync.config.schema import ModelConfig
from megaasync.models.transformer import is_moe_layer
from megaasync.nn.recompute import Mode

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
        recompute: what is made again instead of kept, as `megaasync.nn.recompute` has it.
        loss_chunk_tokens: tokens whose logits are held at once; None for all.
        mask_length: tokens that each token has a place for in the mask of documents; 0 without one.
    """

    tokens: int
    compute: int
    exact: int
    tensor: int
    sequence_parallel: bool
    expert: int
    recompute: Mode = "none"
    loss_chunk_tokens: int | None = None
    mask_length: int = 0

    @property
    def between(self) -> float:
        """Tokens that a rank holds between layers."""
        return self.tokens / self.tensor if self.sequence_parallel else self.tokens


def _norm(config: ModelConfig, sizes: ActivationSizes) -> float:
    return sizes.between * (config.hidden_size * sizes.compute + sizes.exact)


def _swiglu(width: int, sizes: ActivationSizes) -> float:
    """Gate, up, and unless it is made again their product."""
    return (2 if sizes.recompute == "selective" else 3) * sizes.tokens * width / sizes.tensor * sizes.compute


def _normed(config: ModelConfig, sizes: ActivationSizes) -> float:
    """The output of a norm, which the layer on it keeps."""
    return 0.0 if sizes.recompute == "selective" else sizes.tokens * config.hidden_size * sizes.compute


def _attention(config: ModelConfig, sizes: ActivationSizes) -> float:
    head_size = config.hidden_size // config.num_heads
    rows = (2 * config.num_heads + 2 * config.num_kv_heads) * head_size  # queries and outputs, keys and values
    heads = rows * sizes.compute + config.num_heads * sizes.exact  # with a log-sum per head
    if config.qk_norm:  # what the two norms take, and one number per head
        normed = config.num_heads + config.num_kv_heads
        heads += normed * (head_size * sizes.compute + sizes.exact)
    return _normed(config, sizes) + sizes.tokens * heads / sizes.tensor


def _moe(config: ModelConfig, sizes: ActivationSizes) -> float:
    moe, hidden = config.moe, config.hidden_size
    is_selective = sizes.recompute == "selective"
    per_token = hidden * sizes.compute + moe.num_experts * sizes.exact + moe.top_k * (_INDEX + sizes.exact)
    per_token += sizes.exact
    per_choice = hidden * sizes.compute + (2 if is_selective else 3) * moe.ffn_hidden_size * sizes.compute + _INDEX
    if sizes.expert > 1 or not is_selective:  # what came from other ranks is kept
        per_choice += hidden * sizes.compute
    if sizes.compute < sizes.exact:
        per_choice += sizes.compute
    if sizes.expert > 1:
        per_choice += 2 * _INDEX
    total = sizes.tokens / sizes.tensor * (per_token + moe.top_k * per_choice)
    if moe.num_shared_experts:
        total += _swiglu(moe.num_shared_experts * moe.ffn_hidden_size, sizes)
        if sizes.tensor > 1:  # else it is the router's own input
            total += sizes.tokens * hidden * sizes.compute
    return total


def layer_bytes(config: ModelConfig, layer: int, sizes: ActivationSizes) -> float:
    """Bytes that one layer keeps of one microbatch, on one rank."""
    if sizes.recompute == "full":
        return sizes.between * config.hidden_size * sizes.compute
    total = 2 * _norm(config, sizes) + _attention(config, sizes)
    if is_moe_layer(config, layer):
        return total + _moe(config, sizes)
    return total + _normed(config, sizes) + _swiglu(config.ffn_hidden_size, sizes)


def stage_bytes(config: ModelConfig, layers: range, sizes: ActivationSizes) -> int:
    """Bytes that a stage keeps of one microbatch, on one rank; on the last, with the gradients that the loss made."""
    total = (
        sum(layer_bytes(config, layer, sizes) for layer in layers) + sizes.tokens * sizes.mask_length * sizes.compute
    )
    if layers.start == 0:
        total += sizes.tokens * _INDEX
    if layers.stop == config.num_layers:
        total += _norm(config, sizes) + sizes.tokens * config.hidden_size * sizes.compute
        total += config.vocab_size / sizes.tensor * config.hidden_size * sizes.exact
    return round(total)


def workspace(config: ModelConfig, layers: range, sizes: ActivationSizes) -> int:
    """Bytes that a stage needs for a moment: a chunk's logits in both precisions, or a layer that is made again."""
    most = 0.0
    if layers.stop == config.num_layers:
        chunk = min(sizes.loss_chunk_tokens or sizes.tokens, sizes.tokens)
        most = chunk * config.vocab_size / sizes.tensor * (sizes.compute + sizes.exact)
    if sizes.recompute == "full":
        whole = replace(sizes, recompute="none")
        most = max(most, *(layer_bytes(config, layer, whole) for layer in layers))
    return round(most)
