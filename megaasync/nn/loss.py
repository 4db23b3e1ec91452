"""Next-token cross entropy, as a sum: the divisor is the global batch's count of valid tokens, known only later."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megaasync.config.parallel_dims import local_range
from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.kernels.backend import Kernels
from megaasync.kernels.weight_gradients import accumulate_or_defer, add_product_
from megaasync.nn.layer_context import DEFAULT_CONTEXT, LayerContext
from megaasync.nn.precision import at_least_float32
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Sum of the losses of the tokens under the mask, in nats: what `head_loss` computes, from the logits.

    Args:
        logits_BSV: [B, S, V].
        labels_BS: [B, S] int64.
        mask_BS: [B, S] bool.

    Returns:
        Scalar of at least float32; 0 if the mask is empty.
    """
    logits_TV = logits_BSV.flatten(0, 1).to(at_least_float32(logits_BSV.dtype))
    labels_T = labels_BS.flatten().masked_fill(~mask_BS.flatten(), -100)
    return F.cross_entropy(logits_TV, labels_T, ignore_index=-100, reduction="sum")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Over which ranks the vocabulary is split, where this rank's part of it starts, and how the loss is computed."""

    size: int
    group: RankGroup
    start: int
    chunk_tokens: int
    has_gradient: bool
    kernels: Kernels


class _HeadLoss(torch.autograd.Function):
    """The head and its loss, a chunk of tokens at a time: no more than one chunk's logits are ever held.

    A chunk's gradients are made right after its losses, from the same logits, as the loss's own gradient is one number
    by which they are multiplied later. What is kept for the backward is [T, D] and [V, D].
    """

    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, valid_T: Tensor, split: _Vocabulary) -> Tensor:  # noqa: ANN001
        exact = at_least_float32(x_TD.dtype)
        total = x_TD.new_zeros((), dtype=exact)
        if split.has_gradient:
            x_grad_TD, weight_grad_VD = torch.empty_like(x_TD), torch.zeros_like(weight_VD, dtype=exact)
        for start in range(0, len(x_TD), split.chunk_tokens):
            part = slice(start, start + split.chunk_tokens)
            losses_C, grad_CV = split.kernels.cross_entropy(
                F.linear(x_TD[part], weight_VD).to(exact),
                labels_T[part],
                valid_T[part],
                vocab_size=split.size,
                start=split.start,
                group=split.group,
                has_gradient=split.has_gradient,
            )
            total += losses_C.sum()
            if split.has_gradient:
                grad_CV = grad_CV.to(x_TD.dtype)
                x_grad_TD[part] = grad_CV @ weight_VD
                add_product_(weight_grad_VD, grad_CV, x_TD[part])
        if split.has_gradient:
            ctx.save_for_backward(x_grad_TD, weight_grad_VD)
            ctx.weight = weight_VD
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001 - torch's signature
        (x_grad_TD, weight_grad_VD), weight_VD = ctx.saved_tensors, ctx.weight
        left = accumulate_or_defer(
            weight_VD,
            None,
            add=lambda main: main.addcmul_(weight_grad_VD, grad.to(main.dtype)),
            whole=lambda: (weight_grad_VD * grad).to(weight_VD.dtype),
        )
        return x_grad_TD * grad.to(x_grad_TD.dtype), left, None, None, None


def head_loss(
    x_BSD: Tensor,
    weight_VD: Tensor,
    labels_BS: Tensor,
    mask_BS: Tensor,
    *,
    vocab_size: int,
    context: LayerContext = DEFAULT_CONTEXT,
    tensor: TensorParallel = NO_TENSOR_PARALLEL,
) -> Tensor:
    """Sum of the losses of the tokens under the mask, in nats.

    Args:
        x_BSD: [B, S, D], what the head is given: the whole sequence.
        weight_VD: [V, D] of the head, or this rank's rows of it.
        labels_BS: [B, S] int64.
        mask_BS: [B, S] bool.
        vocab_size: V.
        context: the backend, and how many tokens' logits are held at once.
        tensor: ranks over which the vocabulary is split.

    Returns:
        Scalar of at least float32, the same on all ranks; 0 if the mask is empty.
    """
    x_TD = x_BSD.flatten(0, 1)
    group = tensor.group if tensor.size > 1 else ALONE
    start = local_range(vocab_size, index=group.index, count=group.size).start
    chunk = context.loss_chunk_tokens or len(x_TD)
    split = _Vocabulary(vocab_size, group, start, chunk, torch.is_grad_enabled(), context.kernels)
    return _HeadLoss.apply(x_TD, weight_VD, labels_BS.flatten(), mask_BS.flatten(), split)
