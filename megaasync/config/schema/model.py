"""The network: group `model`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaasync.fields import Range


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture-of-experts feed-forward layers.

    Attributes:
        num_experts: routed experts per layer.
        top_k: experts per token.
        ffn_hidden_size: inner width of one expert.
        num_shared_experts: experts that see every token, fused into one of that many times the width.
        first_dense_layers: layers at the bottom that stay dense.
        score_function: of the router's logits.
        normalize_top_k: the weights of a token's experts are made to sum to one.
        capacity_factor: an expert takes at most this many times its even share of a rank's microbatch, and drops the
            rest; null drops nothing.
        bias_update_rate: after each step, experts above the mean load get this much less bias for the choice, those
            below more (arXiv 2408.15664); 0 is off.
        sequence_balance_loss: coefficient of the balance loss within each sequence (arXiv 2412.19437); 0 is off.
        global_balance_loss: coefficient of the balance loss against the whole batch before (arXiv 2501.11873).
        z_loss: coefficient of the squared log of the softmax's denominator (arXiv 2202.08906).
    """

    num_experts: Annotated[int, Range(at_least=1)]
    top_k: Annotated[int, Range(at_least=1)]
    ffn_hidden_size: Annotated[int, Range(at_least=1)]
    num_shared_experts: Annotated[int, Range(at_least=0)]
    first_dense_layers: Annotated[int, Range(at_least=0)]
    score_function: Literal["softmax", "sigmoid"]
    normalize_top_k: bool
    capacity_factor: Annotated[float | None, Range(above=0, remedy="set null to drop no token")]
    bias_update_rate: Annotated[float, Range(at_least=0)]
    sequence_balance_loss: Annotated[float, Range(at_least=0)]
    global_balance_loss: Annotated[float, Range(at_least=0)]
    z_loss: Annotated[float, Range(at_least=0)]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, dense or mixture of experts.

    Attributes:
        num_layers, hidden_size, num_heads, num_kv_heads, ffn_hidden_size: shape; the last is the dense layers'.
        vocab_size: rows of the embedding, at least the tokenizer's number of pieces.
        seq_length: tokens per sequence.
        tie_embeddings: the head uses the embedding's weights.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of RMSNorm.
        init_std: standard deviation of initial weights; output projections divide it by sqrt(2 num_layers).
        moe: null for a dense model.
        qk_norm: RMSNorm over each head of queries and keys before the rotary positions, as Qwen3 has it.
    """

    name: str
    num_layers: Annotated[int, Range(at_least=1)]
    hidden_size: Annotated[int, Range(at_least=1)]
    num_heads: Annotated[int, Range(at_least=1)]
    num_kv_heads: Annotated[int, Range(at_least=1)]
    ffn_hidden_size: Annotated[int, Range(at_least=1)]
    vocab_size: Annotated[int, Range(at_least=2)]
    seq_length: Annotated[int, Range(at_least=1)]
    tie_embeddings: bool
    rope_theta: Annotated[float, Range(above=0)]
    norm_eps: Annotated[float, Range(above=0)]
    init_std: Annotated[float, Range(above=0)]
    moe: MoeConfig | None
    qk_norm: bool = False
