"""The router of a mixture of experts: scores in at least float32, top-k, and what keeps the experts' loads even.

Losses are sums over tokens, as the cross entropy is, and only linear in what a token adds: so they are the same however
the batch is cut. Tokens outside the mask are routed like others and counted nowhere.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.config.schema import MoeConfig
from megaasync.kernels.backend import Kernels
from megaasync.kernels.weight_gradients import accumulate_or_defer, add_product_
from megaasync.nn.precision import at_least_float32
from megaasync.nn.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel
from megaasync.nn.torch_kernels import TORCH_KERNELS

LOSSES = ("sequence_balance_loss", "global_balance_loss", "z_loss")  # keys of MoeConfig, in the order of Routing.losses


@dataclass(frozen=True, slots=True)
class Routing:
    """Where each token goes.

    Attributes:
        weights_TK: [T, K] in at least float32.
        experts_TK: [T, K] int64.
        counts_E: [E] int64, choices of valid tokens.
        losses_3: [3] in at least float32, auxiliary losses times their coefficients, summed over tokens; None if the
            config asks for none.
    """

    weights_TK: Tensor
    experts_TK: Tensor
    counts_E: Tensor
    losses_3: Tensor | None


class RoutingObserver(Protocol):
    """Whoever counts what the routers of a stage do in a batch."""

    def add(self, layer: int, routing: Routing) -> None:
        """Router number `layer` of the stage has routed a microbatch."""


def count_choices(experts_TK: Tensor, valid_T: Tensor, num_experts: int) -> Tensor:
    """[E] int64, how often valid tokens chose each expert."""
    ones_TK = valid_T.to(experts_TK.dtype).unsqueeze(-1).expand_as(experts_TK)
    # not bincount, which would wait for a GPU to learn the largest value
    return experts_TK.new_zeros(num_experts).index_add_(0, experts_TK.flatten(), ones_TK.flatten())


class _ExactLinear(torch.autograd.Function):
    """A product in at least float32 that keeps its input as it came."""

    @staticmethod
    def forward(ctx, x_BSD: Tensor, weight_ED: Tensor) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.save_for_backward(x_BSD)
        ctx.weight = weight_ED
        exact = at_least_float32(x_BSD.dtype)
        return F.linear(x_BSD.to(exact), weight_ED.to(exact))

    @staticmethod
    def backward(ctx, grad_BSE: Tensor) -> tuple[Tensor, Tensor | None]:  # noqa: ANN001 - torch's signature
        (x_BSD,), weight_ED = ctx.saved_tensors, ctx.weight
        grad_TE, x_TD = grad_BSE.flatten(0, 1), x_BSD.flatten(0, 1).to(grad_BSE.dtype)
        left = accumulate_or_defer(
            weight_ED,
            None,
            add=lambda main: add_product_(main, grad_TE, x_TD),
            whole=lambda: (grad_TE.T @ x_TD).to(weight_ED.dtype),
        )
        return (grad_BSE @ weight_ED.to(grad_BSE.dtype)).to(x_BSD.dtype), left


class Router(nn.Module):
    """Scores tokens against experts; weight [E, D].

    Attributes:
        bias_E: added to the scores for the choice only (auxiliary-loss-free balancing, arXiv 2408.15664).
        fractions_E: share of the choices that each expert had in the batch before; they sum to 1.
        observer: told of every routing, if there is one.
        layer: this router's number in its stage.
    """

    bias_E: Tensor
    fractions_E: Tensor
    observer: RoutingObserver | None = None
    layer = 0

    def __init__(
        self,
        config: MoeConfig,
        *,
        hidden_size: int,
        tensor: TensorParallel = NO_TENSOR_PARALLEL,
        kernels: Kernels = TORCH_KERNELS,
    ) -> None:
        super().__init__()
        self._config, self._tensor, self._kernels = config, tensor, kernels
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        exact = at_least_float32(torch.get_default_dtype())
        self.register_buffer("bias_E", torch.zeros(config.num_experts, dtype=exact))
        self.register_buffer("fractions_E", torch.full((config.num_experts,), 1 / config.num_experts, dtype=exact))

    def forward(self, x_BSD: Tensor, mask_BS: Tensor) -> Routing:
        """Route this rank's tokens.

        Args:
            x_BSD: [B, S, D], or this tensor-parallel rank's part of the sequence.
            mask_BS: [B, S] bool of the whole sequence.
        """
        config = self._config
        logits_BSE = _ExactLinear.apply(x_BSD, self.weight)
        weights_TK, experts_TK = self._kernels.topk_routing(logits_BSE.flatten(0, 1), self.bias_E, config)
        valid_BS = self._tensor.own_tokens(mask_BS)
        counts_E = count_choices(experts_TK, valid_BS.flatten(), config.num_experts)
        losses_3 = None
        if any(getattr(config, name) for name in LOSSES):
            losses_3 = self._losses(logits_BSE, experts_TK, mask_BS, valid_BS)
        routing = Routing(weights_TK, experts_TK, counts_E, losses_3)
        if self.observer is not None:
            self.observer.add(self.layer, routing)
        return routing

    def _losses(self, logits_BSE: Tensor, experts_TK: Tensor, mask_BS: Tensor, valid_BS: Tensor) -> Tensor:
        config, num_experts = self._config, self._config.num_experts
        scores_BSE = logits_BSE.softmax(dim=-1) if config.score_function == "softmax" else logits_BSE.sigmoid()
        valid_BS1 = valid_BS.unsqueeze(-1).to(scores_BSE.dtype)
        shares_BSE = scores_BSE / scores_BSE.sum(dim=-1, keepdim=True) * valid_BS1
        zero = scores_BSE.new_zeros(())
        losses = dict.fromkeys(LOSSES, zero)
        if config.sequence_balance_loss:
            # arXiv 2412.19437, equations 17 to 20, times the sequence's tokens
            chosen_BSE = torch.zeros_like(shares_BSE).scatter_(2, experts_TK.view(*valid_BS.shape, -1), 1.0)
            counts_BE = (chosen_BSE * valid_BS1).sum(dim=1)
            self._tensor.group.all_reduce(counts_BE)
            tokens_B1 = mask_BS.sum(dim=1, keepdim=True).clamp_min(1)
            fractions_BE = counts_BE * (num_experts / config.top_k) / tokens_B1
            losses["sequence_balance_loss"] = (fractions_BE * shares_BSE.sum(dim=1)).sum()
        if config.global_balance_loss:
            # arXiv 2501.11873 with the fractions of the batch before
            losses["global_balance_loss"] = num_experts * (self.fractions_E * shares_BSE.sum(dim=(0, 1))).sum()
        if config.z_loss:
            losses["z_loss"] = (logits_BSE.logsumexp(dim=-1).square() * valid_BS1.squeeze(-1)).sum()  # arXiv 2202.08906
        return torch.stack([getattr(config, name) * losses[name] for name in LOSSES])
