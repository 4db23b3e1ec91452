"""A pipeline stage of the decoder: any run of layers, with the embedding in front or the head behind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaasync.config.schema import ModelConfig
from megaasync.data.microbatches import Microbatch
from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.distributed.sharding import Shape
from megaasync.nn.attention import Attention
from megaasync.nn.layer_context import DEFAULT_CONTEXT, LayerContext
from megaasync.nn.linear import Embedding, Linear
from megaasync.nn.loss import head_loss
from megaasync.nn.mlp import SwiGLU
from megaasync.nn.moe import MoE
from megaasync.nn.rope import RotaryTables
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


def is_moe_layer(config: ModelConfig, layer: int) -> bool:
    """Whether a layer (counted over the whole model) has experts."""
    return config.moe is not None and layer >= config.moe.first_dense_layers


TIED_PARAMETER = "embedding.weight"  # of the first and of the last stage, if the embeddings are tied


@dataclass(frozen=True, slots=True)
class ModelParallelGroups:
    """Over which ranks the layers themselves are split: matrices over `tensor`, experts over `expert`."""

    tensor: TensorParallel = NO_TENSOR_PARALLEL
    expert: RankGroup = ALONE


NO_MODEL_PARALLEL = ModelParallelGroups()


class TransformerBlock(nn.Module):
    """Pre-norm block: attention, then a dense or mixture-of-experts feed-forward."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        splits: ModelParallelGroups = NO_MODEL_PARALLEL,
        context: LayerContext = DEFAULT_CONTEXT,
    ) -> None:
        super().__init__()
        hidden, tensor = config.hidden_size, splits.tensor
        self._tensor, self._recompute = tensor, context.recompute
        self.attention_norm = context.kernels.norm(hidden, eps=config.norm_eps, tensor=tensor)
        self.attention = Attention(
            hidden_size=hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            norm_eps=config.norm_eps if config.qk_norm else None,
            tensor=tensor,
            context=context,
        )
        self.mlp_norm = context.kernels.norm(hidden, eps=config.norm_eps, tensor=tensor)
        self._is_moe = is_moe_layer(config, layer)
        self.mlp: nn.Module = (
            MoE(config.moe, hidden_size=hidden, tensor=tensor, expert=splits.expert, context=context)
            if self._is_moe
            else SwiGLU(hidden_size=hidden, ffn_hidden_size=config.ffn_hidden_size, tensor=tensor, context=context)
        )

    def forward(self, x_BSD: Tensor, rotary: RotaryTables, mask_BS: Tensor | None, attn_mask: Any) -> Tensor:
        """[B, S, D] to [B, S, D]; a mixture of experts needs to know which tokens are valid, attention documents."""
        x_BSD = x_BSD + self._on_normed(
            x_BSD, self.attention_norm, lambda y_BSD: self.attention(y_BSD, rotary, attn_mask)
        )
        if self._is_moe:
            return x_BSD + self.mlp(self.mlp_norm(x_BSD), mask_BS)
        return x_BSD + self._on_normed(x_BSD, self.mlp_norm, self.mlp)

    def _on_normed(self, x_BSD: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """A layer on the whole sequence of the norm of x."""

        def make() -> Tensor:
            return self._tensor.enter(norm(x_BSD))

        normed_BSD = make()
        with self._recompute.recompute_in_backward(normed_BSD, make):
            return layer(normed_BSD)


class DecoderStage(nn.Module):
    """The layers of one stage. Parameter names carry the layer's number in the whole model.

    The first stage turns tokens into hidden states, the last one hidden states into the sum of the losses.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        splits: ModelParallelGroups = NO_MODEL_PARALLEL,
        context: LayerContext = DEFAULT_CONTEXT,
    ) -> None:
        super().__init__()
        self._context = context
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        tied = config.tie_embeddings and is_last
        self._vocab_size, self._tensor = config.vocab_size, splits.tensor
        self.embedding = (
            Embedding(config.vocab_size, config.hidden_size, tensor=splits.tensor) if is_first or tied else None
        )
        self.layers = nn.ModuleDict({str(layer): TransformerBlock(config, layer, splits, context) for layer in layers})
        self.rotary = RotaryTables(
            seq_length=config.seq_length,
            head_size=config.hidden_size // config.num_heads,
            theta=config.rope_theta,
        )
        self.final_norm = (
            context.kernels.norm(config.hidden_size, eps=config.norm_eps, tensor=splits.tensor) if is_last else None
        )
        self.head = Linear(config.hidden_size, splits.tensor.share(config.vocab_size)) if is_last else None
        if tied:
            self.head.weight = self.embedding.weight
        self._is_first, self._is_last = is_first, is_last

    def forward(self, x_BSD: Tensor | None, microbatch: Microbatch | None) -> Tensor:
        """Run the stage.

        Args:
            x_BSD: [B, S, D] from the stage before, or S / size under sequence parallelism; None on the first.
            microbatch: its tokens feed the first stage, its labels and mask the last, its mask any mixture of experts,
                its documents all.

        Returns:
            As x_BSD, or on the last stage the scalar sum of losses.
        """
        if self._is_first:
            x_BSD = self.embedding(microbatch.tokens_BS)
        mask_BS = None if microbatch is None else microbatch.mask_BS
        kernels = self._context.kernels
        documents_BS = None if microbatch is None else microbatch.documents_BS
        attn_mask = None if documents_BS is None else kernels.build_document_mask(documents_BS, dtype=x_BSD.dtype)
        with kernels.autocast():
            for layer in self.layers.values():
                x_BSD = self._context.recompute.layer(layer, x_BSD, self.rotary, mask_BS, attn_mask)
        if not self._is_last:
            return x_BSD
        return head_loss(
            self._tensor.enter(self.final_norm(x_BSD)),
            self.head.weight,
            microbatch.labels_BS,
            microbatch.mask_BS,
            vocab_size=self._vocab_size,
            context=self._context,
            tensor=self._tensor,
        )


def stage_shapes(config: ModelConfig, layers: range) -> dict[str, Shape]:
    """Shapes of one stage's whole parameters by name; no memory is taken."""
    with torch.device("meta"):
        stage = DecoderStage(config, layers)
    return {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}
