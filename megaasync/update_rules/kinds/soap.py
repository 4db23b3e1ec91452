"""SOAP (Adam in the eigenbasis of Shampoo's preconditioner) for matrices, AdamW for the rest; t counts from 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megaasync.fields import Range
from megaasync.update_rules.kinds.adamw import AdamW
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

if TYPE_CHECKING:
    from torch import Tensor

    from megaasync.update_rules.update_rule import State


@dataclass(frozen=True, slots=True)
class SoapConfig(OptimizerConfig):
    """SOAP (arXiv 2409.11321) for matrices, AdamW for the rest.

    Attributes:
        betas: of the moments in the eigenbasis; the second one also of the preconditioner.
        refresh_interval: updates between steps of the eigenbases.
        first_basis: gradients that are gathered, without an update, before the first eigenbasis.
        largest_side: rows or columns above which a side keeps its own axes.
        adamw_betas: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["soap"]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    refresh_interval: Annotated[int, Range(at_least=1)]
    first_basis: Annotated[int, Range(at_least=1)]
    largest_side: Annotated[int, Range(at_least=1)]
    adamw_betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]

    def rules(self) -> Rules:
        """SOAP for matrices, AdamW for the rest."""
        matrix = Soap(self.betas, self.eps, self.refresh_interval, self.first_basis, self.largest_side)
        return Rules(AdamW(self.adamw_betas, self.eps), matrix)


def _eigenbasis(symmetric: Tensor) -> Tensor:
    """Eigenvectors [..., n, n] in columns, the largest eigenvalue first."""
    import torch

    try:
        vectors = torch.linalg.eigh(symmetric)[1]
    except torch.linalg.LinAlgError:  # in float32, of matrices that are nearly singular
        vectors = torch.linalg.eigh(symmetric.double())[1].to(symmetric.dtype)
    return vectors.flip(-1)


def _power_step(symmetric: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """(The basis after one step of orthogonal iteration, the order of its former columns in it)."""
    import torch

    product = symmetric @ basis
    order = (basis * product).sum(dim=-2).argsort(dim=-1, descending=True)
    return torch.linalg.qr(product.take_along_dim(order.unsqueeze(-2), dim=-1))[0], order


@dataclass(frozen=True, slots=True)
class Soap:
    """SOAP (arXiv 2409.11321), in the form of its authors' code, of matrices [..., rows, cols].

    L = b L + (1-b) g g^T, R = b R + (1-b) g^T g with b = b2; bases QL, QR of their eigenvectors. The first
    `first_basis` gradients go into L and R only (the authors: one) and the update is zero. Then, with the bases of the
    step before: m = b1 m + (1-b1) g; v = b2 v + (1-b2) (QL^T g QR)^2; d = QL ((QL^T m QR) / (sqrt(v) + eps)) QR^T
    sqrt(1-b2^k) / (1-b1^k), k = t - first_basis. Every `refresh_interval` steps one step of orthogonal iteration
    follows: columns in the order of their estimated eigenvalues, v with them, then QR. A side longer than
    `largest_side` is left in its own axes.

    L of a first gradient with fewer columns than rows has a null space, whose basis is whatever the library gives; with
    `first_basis` of several gradients the run does not depend on it (docs/method.md).
    """

    betas: tuple[float, float]
    eps: float
    refresh_interval: int
    first_basis: int
    largest_side: int

    def init(self, like: Tensor) -> State:
        """Moments, both sides' second moments and their bases."""
        left, right = (n if n <= self.largest_side else 0 for n in like.shape[-2:])
        stack = like.shape[:-2]
        state = {"m": like.new_zeros(like.shape), "v": like.new_zeros(like.shape)}
        for side, n in (("left", left), ("right", right)):
            state[side], state[f"{side}_basis"] = like.new_zeros(*stack, n, n), like.new_zeros(*stack, n, n)
        return state

    def direction(self, grad: Tensor, state: State, *, count: int) -> Tensor:
        """Bias-corrected Adam direction in the basis of the step before."""
        beta1, beta2 = self.betas
        steps = count - self.first_basis
        direction = grad.new_zeros(grad.shape)
        if steps > 0:
            state["m"].lerp_(grad, 1 - beta1)
            state["v"].lerp_(_into_basis(grad, state).square_(), 1 - beta2)
            ahead = _into_basis(state["m"], state).div_(state["v"].sqrt().add_(self.eps))
            direction = _out_of_basis(ahead, state).mul_(math.sqrt(1 - beta2**steps) / (1 - beta1**steps))
        for side, outer in (("left", grad @ grad.mT), ("right", grad.mT @ grad)):
            if state[side].numel() > 0:
                state[side].lerp_(outer, 1 - beta2)
        if steps == 0:
            for side in ("left", "right"):
                if state[side].numel() > 0:
                    state[f"{side}_basis"].copy_(_eigenbasis(state[side]))
        elif steps > 0 and steps % self.refresh_interval == 0:
            self._refresh(state)
        return direction

    @staticmethod
    def _refresh(state: State) -> None:
        for side, dim in (("left", -2), ("right", -1)):
            if state[side].numel() == 0:
                continue
            basis, order = _power_step(state[side], state[f"{side}_basis"])
            if not basis.isfinite().all():
                continue  # keep the one before
            state[f"{side}_basis"].copy_(basis)
            along = order.unsqueeze(-1) if dim == -2 else order.unsqueeze(-2)
            state["v"].copy_(state["v"].take_along_dim(along, dim=dim))


def _into_basis(x: Tensor, state: State) -> Tensor:
    """QL^T x QR, a new tensor."""
    left, right = state["left_basis"], state["right_basis"]
    x = left.mT @ x if left.numel() > 0 else x.clone()
    return x @ right if right.numel() > 0 else x


def _out_of_basis(x: Tensor, state: State) -> Tensor:
    """QL x QR^T; x may be written to."""
    left, right = state["left_basis"], state["right_basis"]
    x = left @ x if left.numel() > 0 else x
    return x @ right.mT if right.numel() > 0 else x
