"""Next-token cross entropy, as a sum: the divisor is the global batch's count of valid tokens, known only later."""

from torch import Tensor
from torch.nn import functional as F

from megaasync.nn.precision import at_least_float32


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Sum of the losses of the tokens under the mask, in nats.

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
