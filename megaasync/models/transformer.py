"""A pipeline stage of the decoder: any run of layers, with the embedding in front or the head behind."""

from torch import Tensor, nn

from megaasync.config.schema import ModelConfig
from megaasync.data.microbatches import Microbatch
from megaasync.nn.attention import Attention
from megaasync.nn.linear import Embedding, Linear
from megaasync.nn.loss import cross_entropy_sum
from megaasync.nn.mlp import SwiGLU
from megaasync.nn.moe import MoE
from megaasync.nn.norm import RMSNorm
from megaasync.nn.rope import RotaryTables


def is_moe_layer(config: ModelConfig, layer: int) -> bool:
    """Whether a layer (counted over the whole model) has experts."""
    return config.moe is not None and layer >= config.moe.first_dense_layers


TIED_PARAMETER = "embedding.weight"  # of the first and of the last stage, if the embeddings are tied


class TransformerBlock(nn.Module):
    """Pre-norm block: attention, then a dense or mixture-of-experts feed-forward."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.attention_norm = RMSNorm(hidden, eps=config.norm_eps)
        self.attention = Attention(hidden_size=hidden, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
        self.mlp_norm = RMSNorm(hidden, eps=config.norm_eps)
        if is_moe_layer(config, layer):
            moe = config.moe
            self.mlp: nn.Module = MoE(
                hidden_size=hidden,
                num_experts=moe.num_experts,
                top_k=moe.top_k,
                ffn_hidden_size=moe.ffn_hidden_size,
                num_shared_experts=moe.num_shared_experts,
            )
        else:
            self.mlp = SwiGLU(hidden_size=hidden, ffn_hidden_size=config.ffn_hidden_size)

    def forward(self, x_BSD: Tensor, rotary: RotaryTables) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class DecoderStage(nn.Module):
    """The layers of one stage. Parameter names carry the layer's number in the whole model.

    The first stage turns tokens into hidden states, the last one hidden states into the sum of the losses.
    """

    def __init__(self, config: ModelConfig, layers: range) -> None:
        super().__init__()
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        tied = config.tie_embeddings and is_last
        self.embedding = Embedding(config.vocab_size, config.hidden_size) if is_first or tied else None
        self.layers = nn.ModuleDict({str(layer): TransformerBlock(config, layer) for layer in layers})
        self.rotary = RotaryTables(
            seq_length=config.seq_length,
            head_size=config.hidden_size // config.num_heads,
            theta=config.rope_theta,
        )
        self.final_norm = RMSNorm(config.hidden_size, eps=config.norm_eps) if is_last else None
        self.head = Linear(config.hidden_size, config.vocab_size) if is_last else None
        if tied:
            self.head.weight = self.embedding.weight
        self._is_first, self._is_last = is_first, is_last

    def forward(self, x_BSD: Tensor | None, microbatch: Microbatch) -> Tensor:
        """Run the stage.

        Args:
            x_BSD: [B, S, D] from the stage before; None on the first.
            microbatch: its tokens feed the first stage, its labels and mask the last.

        Returns:
            [B, S, D], or on the last stage the scalar sum of losses.
        """
        if self._is_first:
            x_BSD = self.embedding(microbatch.tokens_BS)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, self.rotary)
        if not self._is_last:
            return x_BSD
        logits_BSV = self.head(self.final_norm(x_BSD))
        return cross_entropy_sum(logits_BSV, microbatch.labels_BS, microbatch.mask_BS)
