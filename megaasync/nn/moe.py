"""A dropless mixture of experts: softmax router in at least float32, top-k, SwiGLU experts, optional shared experts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.kernels.weight_gradients import WeightGradientQueue, expert_linear
from megaasync.nn.mlp import SwiGLU
from megaasync.nn.precision import at_least_float32


@dataclass(frozen=True, slots=True)
class Routing:
    """Where each token goes: weights_TK in at least float32 (they sum to one per token), experts_TK int64."""

    weights_TK: Tensor
    experts_TK: Tensor


class Router(nn.Module):
    """Scores tokens against experts; weight [E, D]."""

    def __init__(self, *, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self._top_k = top_k

    def forward(self, x_TD: Tensor) -> Routing:
        """[T, D] to the top_k experts of each token, their weights renormalised."""
        exact = at_least_float32(x_TD.dtype)
        probabilities_TE = F.linear(x_TD.to(exact), self.weight.to(exact)).softmax(dim=-1)
        weights_TK, experts_TK = probabilities_TE.topk(self._top_k, dim=-1)
        return Routing(weights_TK / weights_TK.sum(dim=-1, keepdim=True), experts_TK)


class Experts(nn.Module):
    """E SwiGLU feed-forwards: gate and up [E, F, D], down [E, D, F].

    Attributes:
        weight_gradients: where a split backward leaves the weights' gradients.
    """

    weight_gradients: WeightGradientQueue | None = None

    def __init__(self, *, num_experts: int, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.up = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """[R, D] rows sorted by expert, [E] rows of each expert, to [R, D]."""
        queue = self.weight_gradients
        gate_RF = expert_linear(x_RD, self.gate, counts_E, queue)
        up_RF = expert_linear(x_RD, self.up, counts_E, queue)
        return expert_linear(F.silu(gate_RF) * up_RF, self.down, counts_E, queue)


class _Permute(torch.autograd.Function):
    """Rows in another order. The backward is a gather by the inverse permutation.

    Plain indexing would add rows into place, in an order that a GPU does not fix; so runs repeat bit for bit.
    """

    @staticmethod
    def forward(ctx, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.save_for_backward(inverse_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001 - torch's signature
        (inverse_R,) = ctx.saved_tensors
        return grad_RD[inverse_R], None, None


class MoE(nn.Module):
    """Router, routed experts and shared experts; no token is dropped."""

    def __init__(
        self, *, hidden_size: int, num_experts: int, top_k: int, ffn_hidden_size: int, num_shared_experts: int
    ) -> None:
        super().__init__()
        self._num_experts = num_experts
        self.router = Router(hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
        self.experts = Experts(num_experts=num_experts, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        self.shared = (
            SwiGLU(hidden_size=hidden_size, ffn_hidden_size=num_shared_experts * ffn_hidden_size)
            if num_shared_experts
            else None
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        x_TD = x_BSD.flatten(0, 1)
        routing = self.router(x_TD)
        top_k = routing.experts_TK.shape[1]
        experts_R = routing.experts_TK.flatten()
        order_R = experts_R.argsort(stable=True)
        back_R = torch.empty_like(order_R)
        back_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        # not bincount, which would wait for a GPU to learn the largest value
        counts_E = experts_R.new_zeros(self._num_experts).index_add_(0, experts_R, torch.ones_like(experts_R))
        copies_RD = x_TD.repeat_interleave(top_k, dim=0)
        routed_RD = self.experts(_Permute.apply(copies_RD, order_R, back_R), counts_E)
        chosen_TKD = _Permute.apply(routed_RD, back_R, order_R).view(len(x_TD), top_k, -1)
        y_TD = (chosen_TKD * routing.weights_TK.to(x_TD.dtype).unsqueeze(-1)).sum(dim=1)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x_BSD)
