"""A mixture of SwiGLU experts (arXiv 2401.06066): router, dispatcher, routed experts, optional shared experts."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from megaasync.config.schema import MoeConfig
from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.kernels.activation import swiglu
from megaasync.nn.layer_context import DEFAULT_CONTEXT, LayerContext
from megaasync.nn.mlp import SwiGLU
from megaasync.nn.router import Router
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel
from megaasync.nn.token_dispatcher import Dispatched, TokenDispatcher


class Experts(nn.Module):
    """E SwiGLU feed-forwards: gate and up [E, F, D], down [E, D, F]."""

    def __init__(
        self, *, num_experts: int, hidden_size: int, ffn_hidden_size: int, context: LayerContext = DEFAULT_CONTEXT
    ) -> None:
        super().__init__()
        self._recompute, self._kernels = context.recompute, context.kernels
        kernels = self._kernels
        self.gate_proj, self.up_proj = (
            kernels.expert_linear(num_experts, hidden_size, ffn_hidden_size) for _ in range(2)
        )
        self.down_proj = kernels.expert_linear(num_experts, ffn_hidden_size, hidden_size)
        self.gate = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.up = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))

    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        """[R, D] rows sorted by expert, [E] rows of each expert, to [R, D]."""
        counts_E = self._kernels.tokens_per_expert(counts_E)
        gate_RF, up_RF = self.gate_proj(x_RD, self.gate, counts_E), self.up_proj(x_RD, self.up, counts_E)
        inner_RF = swiglu(gate_RF, up_RF)
        with self._recompute.recompute_in_backward(inner_RF, lambda: swiglu(gate_RF, up_RF)):
            return self.down_proj(inner_RF, self.down, counts_E)


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
        context: LayerContext = DEFAULT_CONTEXT,
    ) -> None:
        super().__init__()
        self._tensor, self._recompute, self._kernels = tensor, context.recompute, context.kernels
        self.router = Router(config, hidden_size=hidden_size, tensor=tensor, kernels=context.kernels)
        self.experts = Experts(
            num_experts=config.num_experts // expert.size,
            hidden_size=hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
            context=context,
        )
        self.shared = (
            SwiGLU(
                hidden_size=hidden_size,
                ffn_hidden_size=config.num_shared_experts * config.ffn_hidden_size,
                tensor=tensor,
                context=context,
            )
            if config.num_shared_experts
            else None
        )
        self._dispatcher = TokenDispatcher(
            num_experts=config.num_experts,
            capacity_factor=config.capacity_factor,
            group=expert,
            kernels=context.kernels,
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
        mine_TD = mine_BSD.flatten(0, 1)
        dispatched = self._dispatcher.dispatch(mine_TD, routing.experts_TK)
        with self._rows_again(mine_TD, dispatched, routing.experts_TK):
            routed_RD = self.experts(dispatched.rows_RD, dispatched.counts_E)
        y_TD = self._dispatcher.combine(routed_RD, dispatched, routing.weights_TK)
        if routing.losses_3 is not None:
            y_TD = _WithLoss.apply(y_TD, routing.losses_3)
        y_BSD = self._tensor.leave_tokens(y_TD.view_as(mine_BSD))
        return y_BSD if self.shared is None else y_BSD + self.shared(self._tensor.enter(x_BSD))

    def _rows_again(self, x_TD: Tensor, dispatched: Dispatched, experts_TK: Tensor) -> AbstractContextManager[None]:
        """Copies of tokens can be made again, unless they came from other ranks or some were dropped."""
        if dispatched.exchange is not None or not self._dispatcher.drops_none:
            return nullcontext()
        return self._recompute.recompute_in_backward(
            dispatched.rows_RD, lambda: self._kernels.permute(x_TD, experts_TK)[0]
        )
