"""Many linear layers at once, one per group of rows: the expert matmul.

torch's grouped matmul where it can run, else a loop over the groups. The loop is the reference.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_ALIGNMENT = 16  # bytes; torch's grouped matmul refuses rows that are not a multiple of it


def grouped_linear_loop(x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """y_r = W_e x_r for the rows r of group e, one matmul per group.

    Args:
        x_RI: [R, I] rows, sorted by group.
        weight_EOI: [E, O, I].
        counts_E: [E] int64, rows of each group; sums to R. Groups may be empty.

    Returns:
        [R, O].
    """
    parts = x_RI.split(counts_E.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_EOI, strict=True)])


def _can_group(x_RI: Tensor, weight_EOI: Tensor) -> bool:
    rows_aligned = all(size * x_RI.element_size() % _ALIGNMENT == 0 for size in weight_EOI.shape[1:])
    return x_RI.dtype is not torch.float64 and rows_aligned and hasattr(F, "grouped_mm") and x_RI.shape[0] > 0


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """As `grouped_linear_loop`, in one kernel where dtype and shape allow; for use inside an autograd function.

    torch's own backward of the kernel refuses gradients that are not contiguous; ours makes them so.
    """
    if not _can_group(x_RI, weight_EOI):
        return grouped_linear_loop(x_RI, weight_EOI, counts_E)
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return F.grouped_mm(x_RI.contiguous(), weight_EOI.transpose(1, 2), offs=ends_E)


def _can_group_product(grad_RO: Tensor, x_RI: Tensor) -> bool:
    rows_aligned = all(t.shape[1] * t.element_size() % _ALIGNMENT == 0 for t in (grad_RO, x_RI))
    return x_RI.dtype is not torch.float64 and rows_aligned and hasattr(F, "grouped_mm") and x_RI.shape[0] > 0


def grouped_product(grad_RO: Tensor, x_RI: Tensor, counts_E: Tensor) -> Tensor:
    """dW_e, the sum over the rows r of group e of grad_r x_r^T; [E, O, I], zero for an empty group."""
    if not _can_group_product(grad_RO, x_RI):
        sizes = counts_E.tolist()
        return torch.stack([g.T @ x for g, x in zip(grad_RO.split(sizes), x_RI.split(sizes), strict=True)])
    ends_E = counts_E.cumsum(0).to(torch.int32)
    product_EOI = F.grouped_mm(grad_RO.contiguous().T, x_RI.contiguous(), offs=ends_E)
    # on some GPUs the kernel leaves what an empty group had in memory (pytorch issue 172439)
    return product_EOI.masked_fill_((counts_E == 0).view(-1, 1, 1), 0.0)


def add_grouped_product_(total_EOI: Tensor, grad_RO: Tensor, x_RI: Tensor, counts_E: Tensor) -> None:
    """total_e += the sum over the rows r of group e of grad_r x_r^T, in place; the total in at least float32."""
    if grad_RO.is_cuda and _can_group_product(grad_RO, x_RI):
        total_EOI.add_(grouped_product(grad_RO, x_RI, counts_E))
        return
    # on a CPU, counts are at hand and a product that is added where it is needed beats one kernel and a sum
    sizes, exact = counts_E.tolist(), total_EOI.dtype
    for total, grad, x in zip(total_EOI, grad_RO.to(exact).split(sizes), x_RI.to(exact).split(sizes), strict=True):
        if len(grad):
            total.addmm_(grad.T, x)
