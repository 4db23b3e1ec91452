"""Next-token cross entropy, as a sum: the divisor is the global batch's count of valid tokens, known only later."""

import torch
from torch import Tensor
from torch.nn import functional as F

from megaasync.config.layout import local_range
from megaasync.distributed.rank_group import RankGroup
from megaasync.nn.precision import at_least_float32
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class _VocabularyParallel(torch.autograd.Function):
    """Cross entropy of logits whose vocabulary is split over ranks; losses and gradients are as of the whole.

    loss_t = log sum_v exp(l_tv - max_t) + max_t - l_t,label (arXiv 1909.08053, section 3); d loss_t / d l_tv is
    softmax_tv, less one at the label. Only [T] numbers travel.
    """

    @staticmethod
    def forward(ctx, logits_TV: Tensor, labels_T: Tensor, valid_T: Tensor, group: RankGroup) -> Tensor:  # noqa: ANN001
        largest_T = logits_TV.amax(dim=-1)
        group.all_reduce(largest_T, largest=True)
        exponentials_TV = (logits_TV - largest_T.unsqueeze(-1)).exp_()
        here_T = (labels_T >= 0) & (labels_T < logits_TV.shape[1]) & valid_T
        column_T = labels_T.where(here_T, 0).unsqueeze(-1)
        label_logits_T = logits_TV.gather(1, column_T).squeeze(-1).where(here_T, 0)
        sums_2T = torch.stack([exponentials_TV.sum(dim=-1), label_logits_T])
        group.all_reduce(sums_2T)
        ctx.save_for_backward(exponentials_TV.div_(sums_2T[0].unsqueeze(-1)), column_T, here_T, valid_T)
        losses_T = sums_2T[0].log() + largest_T - sums_2T[1]
        return losses_T.where(valid_T, 0).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN001 - torch's signature
        softmax_TV, column_T, here_T, valid_T = ctx.saved_tensors
        grad_TV = softmax_TV.masked_fill(~valid_T.unsqueeze(-1), 0)
        grad_TV.scatter_add_(1, column_T, -here_T.to(grad_TV.dtype).unsqueeze(-1))
        return grad_TV.mul_(grad), None, None, None


def cross_entropy_sum(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    mask_BS: Tensor,
    *,
    vocab_size: int | None = None,
    tensor: TensorParallel = NO_TENSOR_PARALLEL,
) -> Tensor:
    """Sum of the losses of the tokens under the mask, in nats.

    Args:
        logits_BSV: [B, S, V], or this rank's part of the vocabulary.
        labels_BS: [B, S] int64.
        mask_BS: [B, S] bool.
        vocab_size: V, where the logits are a part of it.
        tensor: ranks over which the vocabulary is split.

    Returns:
        Scalar of at least float32, the same on all ranks; 0 if the mask is empty.
    """
    logits_TV = logits_BSV.flatten(0, 1).to(at_least_float32(logits_BSV.dtype))
    labels_T, valid_T = labels_BS.flatten(), mask_BS.flatten()
    if tensor.size == 1:
        return F.cross_entropy(logits_TV, labels_T.masked_fill(~valid_T, -100), ignore_index=-100, reduction="sum")
    start = local_range(vocab_size, index=tensor.group.index, count=tensor.size).start
    return _VocabularyParallel.apply(logits_TV, labels_T - start, valid_T, tensor.group)
