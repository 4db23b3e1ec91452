"""The reference backend: torch's own operations, with this project's autograd functions around them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megaasync.distributed.rank_group import RankGroup
from megaasync.kernels.backend import RouterConfig
from megaasync.kernels.permutation import copies_by_expert, sum_of_copies
from megaasync.kernels.weight_gradients import WeightGradientQueue, expert_linear
from megaasync.nn.linear import Linear, RowLinear
from megaasync.nn.norm import RMSNorm
from megaasync.nn.tensor_parallel import TensorParallel


class CausalAttention(nn.Module):
    """torch's scaled dot product attention; H heads share G key-value heads (arXiv 2305.13245)."""

    def forward(
        self, query_BSHK: Tensor, key_BSGK: Tensor, value_BSGK: Tensor, added_B1SS: Tensor | None = None
    ) -> Tensor:
        """To [B, S, H K]; [B, 1, S, S] is added to the scores, None is causal attention over the sequence."""
        if added_B1SS is not None and query_BSHK.is_cuda:  # no fused kernel of a GPU takes both a mask and shared heads
            shared = query_BSHK.shape[2] // key_BSGK.shape[2]
            key_BSGK, value_BSGK = (tensor.repeat_interleave(shared, dim=2) for tensor in (key_BSGK, value_BSGK))
        heads = (tensor.transpose(1, 2) for tensor in (query_BSHK, key_BSGK, value_BSGK))
        mixed_BHSK = F.scaled_dot_product_attention(
            *heads, attn_mask=added_B1SS, is_causal=added_B1SS is None, enable_gqa=True
        )
        return mixed_BHSK.transpose(1, 2).flatten(2)


class _ExpertLinear(nn.Module):
    """torch's grouped matmul where it can run, else a loop."""

    weight_gradients: WeightGradientQueue | None = None

    def forward(self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        """[R, I] to [R, O]."""
        return expert_linear(x_RI, weight_EOI, counts_E, self.weight_gradients)


class TorchKernels:
    """See `megaasync.kernels.backend.Kernels`."""

    name = "torch"

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A linear layer whose weight gradient is added in place."""
        return Linear(in_features, out_features)

    def row_linear(self, in_features: int, out_features: int, tensor: TensorParallel) -> nn.Module:
        """With the collective after it."""
        return RowLinear(in_features, out_features, tensor)

    def norm(self, hidden_size: int, *, eps: float, tensor: TensorParallel) -> nn.Module:
        """Root mean square norm."""
        return RMSNorm(hidden_size, eps=eps)

    def attention(self, *, num_heads: int, num_kv_heads: int, head_size: int, tensor: TensorParallel) -> nn.Module:
        """torch's choice of a fused kernel."""
        return CausalAttention()

    def build_document_mask(self, documents_BS: Tensor, *, dtype: torch.dtype) -> Tensor:
        """[B, 1, S, S] added to scores: 0 in the same document and not later, else -inf. All layers keep one copy."""
        allowed_BSS = (documents_BS.unsqueeze(2) == documents_BS.unsqueeze(1)).tril_()
        added_BSS = torch.full(allowed_BSS.shape, -torch.inf, dtype=dtype, device=allowed_BSS.device)
        return added_BSS.masked_fill_(allowed_BSS, 0.0).unsqueeze(1)

    def expert_linear(self, num_experts: int, in_features: int, out_features: int) -> nn.Module:
        """Linear layers of all experts in one grouped matrix product."""
        return _ExpertLinear()

    def topk_routing(self, logits_TE: Tensor, bias_E: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
        """Scores, top-k by scores and bias, weights by scores alone (arXiv 2408.15664)."""
        scores_TE = logits_TE.softmax(dim=-1) if config.score_function == "softmax" else logits_TE.sigmoid()
        experts_TK = (scores_TE.detach() + bias_E).topk(config.top_k, dim=-1).indices
        weights_TK = scores_TE.gather(1, experts_TK)
        if config.normalize_top_k:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK, experts_TK

    def tokens_per_expert(self, counts_E: Tensor) -> Tensor:
        """[E] as it is: the grouped product reads it on the device."""
        return counts_E

    def permute(self, x_TD: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Rows sorted by expert, by one gather."""
        return copies_by_expert(x_TD, experts_TK)

    def unpermute(self, y_RD: Tensor, order: Tensor, weights_TK: Tensor) -> Tensor:
        """Another one, and the sum."""
        return sum_of_copies(y_RD, order, weights_TK)

    def cross_entropy(
        self,
        logits_CV: Tensor,
        labels_C: Tensor,
        valid_C: Tensor,
        *,
        vocab_size: int,
        start: int,
        group: RankGroup,
        has_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """In place: the gradient, softmax less one at the label, takes the logits' memory.

        loss_t = log sum_v exp(l_tv - max_t) + max_t - l_t,label; of a vocabulary that is split over ranks only the [C]
        numbers travel (arXiv 1909.08053, section 3).
        """
        largest_C = logits_CV.amax(dim=-1)
        group.all_reduce(largest_C, largest=True)
        logits_CV.sub_(largest_C.unsqueeze(-1))
        labels_C = labels_C - start
        here_C = (labels_C >= 0) & (labels_C < logits_CV.shape[1]) & valid_C
        column_C1 = labels_C.where(here_C, 0).unsqueeze(-1)
        label_logits_C = logits_CV.gather(1, column_C1).squeeze(-1).where(here_C, 0)
        sums_2C = torch.stack([logits_CV.exp_().sum(dim=-1), label_logits_C])
        group.all_reduce(sums_2C)
        losses_C = (sums_2C[0].log() - sums_2C[1]).where(valid_C, 0)
        if not has_gradient:
            return losses_C, None
        logits_CV.mul_((valid_C / sums_2C[0]).unsqueeze(-1))
        return losses_C, logits_CV.scatter_add_(1, column_C1, -here_C.to(logits_CV.dtype).unsqueeze(-1))

    def autocast(self) -> AbstractContextManager[None]:
        """A context that changes nothing."""
        return nullcontext()

    def checkpoint(self, module: nn.Module, x: Tensor, *others: Any) -> Tensor:
        """torch's; nothing random is drawn in a layer."""
        return checkpoint(module, x, *others, use_reentrant=False, preserve_rng_state=False)


TORCH_KERNELS = TorchKernels()
