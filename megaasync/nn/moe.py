"""A mixture of SwiGLU experts (arXiv 2401.06066): router, dispatcher, routed experts, optional shared experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.config.schema import MoeConfig
from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.kernels.weight_gradients import WeightGradientQueue, expert_linear
from megaasync.nn.mlp import SwiGLU
from megaasync.nn.router import Router
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel
from megaasync.nn.token_dispatcher import TokenDispatcher


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


class _WithLoss(torch.autograd.Function):
    """Hands on an activation; a loss beside it gets a gradient of one, as the cross entropy's sum does."""

    @staticmethod
    def forward(ctx, y: Tensor, loss: Tensor) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.save_for_backward(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN001 - torch's signature
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class MoE(nn.Module):
    """Router, routed experts, spread over the ranks of a group, and shared experts.

    Tensor-parallel ranks route a part of the sequence each, through whole experts; shared experts are split.
    """

    def __init__(
        self,
        config: MoeConfig,
        *,
        hidden_size: int,
        tensor: TensorParallel = NO_TENSOR_PARALLEL,
        expert: RankGroup = ALONE,
    ) -> None:
        super().__init__()
        self._tensor = tensor
        self.router = Router(config, hidden_size=hidden_size, tensor=tensor)
        self.experts = Experts(
            num_experts=config.num_experts // expert.size,
            hidden_size=hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
        )
        self.shared = (
            SwiGLU(
                hidden_size=hidden_size,
                ffn_hidden_size=config.num_shared_experts * config.ffn_hidden_size,
                tensor=tensor,
            )
            if config.num_shared_experts
            else None
        )
        self._dispatcher = TokenDispatcher(
            num_experts=config.num_experts, capacity_factor=config.capacity_factor, group=expert
        )

    def forward(self, x_BSD: Tensor, mask_BS: Tensor) -> Tensor:
        """Mix.

        Args:
            x_BSD: [B, S, D], or S / size under sequence parallelism.
            mask_BS: [B, S] bool of the whole sequence: which tokens count for loads and balance losses.

        Returns:
            As x_BSD.
        """
        mine_BSD = self._tensor.enter_tokens(x_BSD)
        routing = self.router(mine_BSD, mask_BS)
        dispatched = self._dispatcher.dispatch(mine_BSD.flatten(0, 1), routing.experts_TK)
        routed_RD = self.experts(dispatched.rows_RD, dispatched.counts_E)
        y_TD = self._dispatcher.combine(routed_RD, dispatched, routing.weights_TK)
        if routing.losses_3 is not None:
            y_TD = _WithLoss.apply(y_TD, routing.losses_3)
        y_BSD = self._tensor.leave_tokens(y_TD.view_as(mine_BSD))
        return y_BSD if self.shared is None else y_BSD + self.shared(x_BSD)
