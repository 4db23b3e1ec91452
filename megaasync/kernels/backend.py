"""What layers are made of: one set of names, of which torch's implementation is the reference.

Parameters have the same names and shapes in every backend, so initial weights, optimizer and checkpoints are too.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class TensorSplit(Protocol):
    """Over which ranks a layer is split, as backends need to know it: `megaasync.nn.tensor_parallel`."""

    @property
    def group(self) -> Any:
        """Of the ranks, with torch's group as its `handle`."""

    @property
    def sequence_parallel(self) -> bool:
        """Between layers, each rank has its part of the sequence."""

    @property
    def size(self) -> int:
        """Number of ranks."""


class RouterConfig(Protocol):
    """How experts are chosen: `megaasync.config.schema.MoeConfig`."""

    top_k: int
    score_function: str
    normalize_top_k: bool
    bias_update_rate: float


class Kernels(Protocol):
    """A backend.

    Attributes:
        name: as in `kernels=`.
    """

    name: str

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """[..., in] to [..., out]; `weight` [out, in], no bias."""

    def row_linear(self, in_features: int, out_features: int, tensor: TensorSplit) -> nn.Module:
        """A linear layer whose inputs are split: [B, S, in of this rank] to the ranks' sum [B, S, out].

        Under sequence parallelism to this rank's part of it, [B, S / size, out].
        """

    def norm(self, hidden_size: int, *, eps: float, tensor: TensorSplit) -> nn.Module:
        """x / rms(x) * `weight` [D], computed in at least float32."""

    def attention(self, *, num_heads: int, num_kv_heads: int, head_size: int, tensor: TensorSplit) -> nn.Module:
        """Causal attention of this rank's heads.

        Of query [B, S, H, K], key and value [B, S, G, K], and what `build_document_mask` made or None, to [B, S, H K].
        """

    def build_document_mask(self, documents_BS: Tensor, *, dtype: torch.dtype) -> Any:
        """What attention needs to know to stay within documents, once for all layers.

        Args:
            documents_BS: [B, S] int64, never decreasing along a sequence.
            dtype: of the activations.
        """

    def expert_linear(self, num_experts: int, in_features: int, out_features: int) -> nn.Module:
        """Many linear layers at once, whose weights are given to it.

        [R, I] rows sorted by expert, a parameter [E, O, I], and [E] int64 rows of each expert, to [R, O].
        """

    def topk_routing(self, logits_TE: Tensor, bias_E: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
        """Weights [T, K] in at least float32 and experts [T, K] int64 of each token."""

    def tokens_per_expert(self, counts_E: Tensor) -> Tensor:
        """The rows of each expert, where `expert_linear` wants them; asked for once per layer."""

    def permute(self, x_TD: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, once for each of their experts, sorted by expert: [R, D], and what `unpermute` needs to know."""

    def unpermute(self, y_RD: Tensor, order: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, D]: the sum of each token's rows by their weights."""

    def cross_entropy(
        self,
        logits_CV: Tensor,
        labels_C: Tensor,
        valid_C: Tensor,
        *,
        vocab_size: int,
        start: int,
        group: Any,
        has_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Cross entropy of tokens, and its gradient.

        Args:
            logits_CV: [C, V of this rank] in at least float32; may be overwritten.
            labels_C: [C] int64 of the whole vocabulary.
            valid_C: [C] bool; of other tokens losses and gradients are zero.
            vocab_size: of all ranks.
            start: where this rank's part of the vocabulary begins.
            group: ranks over which it is split.
            has_gradient: whether the gradient is wanted.

        Returns:
            [C] losses, the same on all ranks, and the gradient of their sum, as logits_CV, or None.
        """

    def autocast(self) -> AbstractContextManager[None]:
        """Around the forward of a stage's layers."""

    def checkpoint(self, module: nn.Module, x: Tensor, *others: Any) -> Tensor:
        """Run a layer of which only the input is kept."""
