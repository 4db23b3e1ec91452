"""NVIDIA's Transformer Engine behind our names; the only file that uses it.

Parameters stay ours: its modules hold them under the same names, or use views of them. Weight gradients go into
`main_grad`, in float32, by its own accumulation. Releases 2.14 to 2.20 are known (`te_contract`); the tests read
their signatures.

What is shared between weight versions, and what is not: every version's module is a copy of its own, with quantised
weights of its own, so an FP8 copy of one version is never used with another. The offered FP8 recipes scale by what they
see (a tensor, or blocks of it) and keep no history; so nothing of them is shared, and nothing needs a checkpoint.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megaasync.kernels.backend import Kernels, RouterConfig, TensorSplit
from megaasync.kernels.te_contract import Features
from megaasync.kernels.weight_gradients import WeightGradientQueue

_RECIPES = {"current": "Float8CurrentScaling", "block": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}


def _finish_weight_gradient(module: nn.Module, *_: Any) -> None:
    """After a module's backward: its weight gradient, which it has put aside, now or later."""
    queue: WeightGradientQueue | None = module.weight_gradients
    if queue is not None and queue.is_open:
        queue.add(module.backward_dw)
    else:
        module.backward_dw()


def _sequence_first(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    """Transformer Engine scatters the first dimension: [B, S, D] to [S, B, D]."""
    return (given[0].transpose(0, 1).contiguous(),)


def _batch_first(module: nn.Module, given: tuple[Tensor], y_SBD: Tensor) -> Tensor:
    """And back, of this rank's part of the sequence."""
    return y_SBD.transpose(0, 1)


class _Attention(nn.Module):
    """Heads of this rank, in the layout that our projections give."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(
        self,
        query_BSHK: Tensor,
        key_BSGK: Tensor,
        value_BSGK: Tensor,
        attn_mask: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """To [B, S, H K]; within documents, all sequences are one row of them."""
        if attn_mask is None:
            return self.core(query_layer=query_BSHK, key_layer=key_BSGK, value_layer=value_BSGK)
        starts, longest = attn_mask
        y_TX = self.core(
            query_layer=query_BSHK.flatten(0, 1),
            key_layer=key_BSGK.flatten(0, 1),
            value_layer=value_BSGK.flatten(0, 1),
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            attn_mask_type="padding_causal",
        )
        return y_TX.view(*query_BSHK.shape[:2], -1)


class _ExpertLinear(nn.Module):
    """A GroupedLinear whose weights are views of one parameter [E, O, I].

    The module is kept out of torch's register, so that the only parameter is ours. Its weights are leaves of their own,
    on our memory, with our main gradients.
    """

    weight_gradients: WeightGradientQueue | None = None

    def __init__(
        self,
        module: nn.Module,
        *,
        num_experts: int,
        pads: tuple[nn.Module, nn.Module] | None,
        splits_backward: bool,
        splits_on_host: bool,
    ) -> None:
        super().__init__()
        self._hidden, self._num_experts, self._pads = (module,), num_experts, pads
        self._splits_backward, self._splits_on_host = splits_backward, splits_on_host

    def backward_dw(self) -> None:
        """The weight gradients that a split backward has put aside, oldest microbatch first."""
        (module,) = self._hidden
        module.backward_dw()

    def _use(self, weight_EOI: Tensor) -> nn.Module:
        (module,) = self._hidden
        main_EOI = getattr(weight_EOI, "main_grad", None)
        for expert in range(self._num_experts):
            alias, mine = getattr(module, f"weight{expert}"), weight_EOI.detach()[expert]
            if alias.data_ptr() != mine.data_ptr():
                alias.data = mine
            if main_EOI is not None:
                alias.main_grad = main_EOI[expert]
        return module

    def forward(self, x_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        """[R, I] rows sorted by expert to [R, O]."""
        module = self._use(weight_EOI)
        if self._splits_backward:
            x_RI = _Finish.apply(x_RI, self)
        y_RO = self._multiply(module, x_RI, counts_E)
        return _Fresh.apply(y_RO, self, weight_EOI)

    def _multiply(self, module: nn.Module, x_RI: Tensor, counts_E: Tensor) -> Tensor:
        """`counts_E` is on the host: `tokens_per_expert`."""
        if self._pads is None:
            return module(x_RI, m_splits=counts_E.tolist() if self._splits_on_host else counts_E)
        pad, unpad = self._pads
        sizes = counts_E.tolist()
        padded, padded_sizes = pad(x_RI, m_splits=sizes)
        splits = padded_sizes if self._splits_on_host else torch.tensor(padded_sizes, dtype=torch.int64)
        return unpad(module(padded, m_splits=splits), m_splits=sizes)


class _Fresh(torch.autograd.Function):
    """Hands an activation on; its backward, which runs just before the experts', gives their weights the sums in use.

    The engine says where a step's gradients go when it begins a backward, after the forward has run.
    """

    @staticmethod
    def forward(ctx, y: Tensor, layer: _ExpertLinear, weight_EOI: Tensor) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.layer, ctx.weight = layer, weight_EOI
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001 - torch's signature
        ctx.layer._use(ctx.weight)
        return grad.contiguous(), None, None


class _Finish(torch.autograd.Function):
    """Hands an activation on; its backward runs just after the experts'. A module's hook would hide the parameter."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: _ExpertLinear) -> Tensor:  # noqa: ANN001 - torch's signature
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN001 - torch's signature
        _finish_weight_gradient(ctx.layer)
        return grad, None


class TransformerEngineKernels:
    """See `megaasync.kernels.backend.Kernels`."""

    name = "te"

    def __init__(
        self,
        engine: ModuleType,
        *,
        reference: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        splits_backward: bool,
        fp8: str,
        features: Features,
    ) -> None:
        """The backend.

        Args:
            engine: `transformer_engine.pytorch`.
            reference: for what it cannot do.
            dtype: of the run.
            device: of the rank.
            splits_backward: the schedule has weight gradients apart.
            fp8: `none`, or the recipe of matrix products.
            features: of the release.
        """
        self._features = features
        self._te, self._reference, self._device, self._dtype = engine, reference, device, dtype
        self._splits = splits_backward
        self._recipe = None
        if fp8 != "none":
            recipes = importlib.import_module("transformer_engine.common.recipe")
            self._recipe = getattr(recipes, _RECIPES[fp8])()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TransformerEngineKernels":
        """Itself: copies of a module are made of the same."""
        return self

    def _splitting(self, module: nn.Module) -> nn.Module:
        module.weight_gradients = None
        if self._splits:
            module.register_full_backward_hook(_finish_weight_gradient)
        return module

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """Without a collective: one gather of the sequence serves query, key and value, or gate and up."""
        return self._splitting(
            self._te.Linear(
                in_features=in_features,
                out_features=out_features,
                bias=False,
                fuse_wgrad_accumulation=True,
                params_dtype=self._dtype,
                device=self._device,
                delay_wgrad_compute=self._splits,
            )
        )

    def row_linear(self, in_features: int, out_features: int, tensor: TensorSplit) -> nn.Module:
        """With the collective after it, which Transformer Engine makes."""
        if tensor.size == 1:
            return self.linear(in_features, out_features)
        module = self._te.Linear(
            in_features=in_features * tensor.size,
            out_features=out_features,
            bias=False,
            sequence_parallel=tensor.sequence_parallel,
            tp_group=tensor.group.handle,
            tp_size=tensor.size,
            parallel_mode="row",
            fuse_wgrad_accumulation=True,
            params_dtype=self._dtype,
            device=self._device,
            delay_wgrad_compute=self._splits,
        )
        if tensor.sequence_parallel:
            module.register_forward_pre_hook(_sequence_first)
            module.register_forward_hook(_batch_first)
        return self._splitting(module)

    def norm(self, hidden_size: int, *, eps: float, tensor: TensorSplit) -> nn.Module:
        """RMSNorm in one fused kernel."""
        return self._te.RMSNorm(
            normalized_shape=hidden_size,
            eps=eps,
            sequence_parallel=tensor.sequence_parallel,
            params_dtype=self._dtype,
        )

    def attention(self, *, num_heads: int, num_kv_heads: int, head_size: int, tensor: TensorSplit) -> nn.Module:
        """Flash or cuDNN attention, as Transformer Engine finds best."""
        return _Attention(
            self._te.DotProductAttention(
                num_attention_heads=num_heads,
                kv_channels=head_size,
                num_gqa_groups=num_kv_heads,
                attention_dropout=0.0,
                qkv_format="bshd",
                attn_mask_type="causal",
                sequence_parallel=tensor.sequence_parallel,
                tp_size=tensor.size,
                tp_group=tensor.group.handle,
            )
        )

    def build_document_mask(self, documents_BS: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, int]:
        """[n + 1] int32, where documents begin in the row of all sequences, and its end; and a bound on lengths."""
        is_first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
        is_first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        starts = is_first_BS.flatten().nonzero().flatten()  # the host waits: how many there are decides a shape
        end = starts.new_tensor([documents_BS.numel()])
        return torch.cat([starts, end]).to(torch.int32), documents_BS.shape[1]

    def expert_linear(self, num_experts: int, in_features: int, out_features: int) -> nn.Module:
        """One grouped product; in FP8 the rows of an expert are padded to what it needs."""
        module = self._te.GroupedLinear(
            num_gemms=num_experts,
            in_features=in_features,
            out_features=out_features,
            bias=False,
            fuse_wgrad_accumulation=True,
            params_dtype=self._dtype,
            device=self._device,
            delay_wgrad_compute=self._splits,
            save_original_input=self._recipe is None,  # else it saves parts of it, that no recipe could make again
        )
        for expert in range(num_experts):  # ours come with the first call
            alias = getattr(module, f"weight{expert}")
            alias.data = alias.data.new_empty(0)
        pads = None
        if self._recipe is not None:
            pads = (self._te.Fp8Padding(num_gemms=num_experts), self._te.Fp8Unpadding(num_gemms=num_experts))
        return _ExpertLinear(
            module,
            num_experts=num_experts,
            pads=pads,
            splits_backward=self._splits,
            splits_on_host=self._features.splits_on_host,
        )

    def topk_routing(self, logits_TE: Tensor, bias_E: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
        """Fused, where its conventions are ours."""
        is_sigmoid = config.score_function == "sigmoid"
        is_same = (config.normalize_top_k and config.top_k > 1) if is_sigmoid else config.bias_update_rate == 0
        if not is_same or not self._features.topk_indices:
            return self._reference.topk_routing(logits_TE, bias_E, config)
        probabilities_TE, experts_TK = self._te.router.fused_topk_with_score_function(
            logits=logits_TE,
            topk=config.top_k,
            use_pre_softmax=not is_sigmoid and not config.normalize_top_k,
            num_groups=None,
            group_topk=None,
            scaling_factor=None,
            score_function=config.score_function,
            expert_bias=bias_E if is_sigmoid else None,
            topk_indices=logits_TE.new_empty((len(logits_TE), config.top_k), dtype=torch.int64),
        )
        return probabilities_TE.gather(1, experts_TK), experts_TK

    def tokens_per_expert(self, counts_E: Tensor) -> Tensor:
        """On the host, which asks for them anyway: once for the three products of a layer."""
        return counts_E.cpu()

    def permute(self, x_TD: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Rows sorted by expert, in one fused kernel."""
        return self._te.moe_permute(
            inp=x_TD,
            routing_map=experts_TK.to(torch.int32),
            num_out_tokens=experts_TK.numel(),
            map_type="index",
        )

    def unpermute(self, y_RD: Tensor, order: Tensor, weights_TK: Tensor) -> Tensor:
        """Fused with the weighted sum."""
        return self._te.moe_unpermute(inp=y_RD, row_id_map=order, merging_probs=weights_TK, map_type="index")

    def cross_entropy(
        self,
        logits_CV: Tensor,
        labels_C: Tensor,
        valid_C: Tensor,
        *,
        vocab_size: int,
        start: int,
        group: Any,
        has_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Fused, where every rank has as much of the vocabulary as any other, and a gradient is wanted."""
        if vocab_size % group.size or not has_gradient:  # the same on all ranks: their collectives must meet
            return self._reference.cross_entropy(
                logits_CV,
                labels_C,
                valid_C,
                vocab_size=vocab_size,
                start=start,
                group=group,
                has_gradient=has_gradient,
            )
        logits_1CV = logits_CV.detach().unsqueeze(0).requires_grad_()
        overwrite = {"overwrite_input": True} if self._features.overwrite_input else {}
        with torch.enable_grad():
            losses_1C = self._te.parallel_cross_entropy(
                inp=logits_1CV,
                target=labels_C.masked_fill(~valid_C, -100).unsqueeze(0),
                reduce_loss=False,
                dist_process_group=group.handle,
                ignore_idx=-100,
                **overwrite,
            )
            (grad_1CV,) = torch.autograd.grad(losses_1C.sum(), logits_1CV)
        return losses_1C.detach().view(-1), grad_1CV.squeeze(0)

    def autocast(self) -> AbstractContextManager[None]:
        """Products in FP8, if a recipe is asked for."""
        if self._recipe is None:
            return nullcontext()
        return self._te.autocast(enabled=True, recipe=self._recipe)

    def checkpoint(self, module: Callable[..., Tensor], x: Tensor, *others: Any) -> Tensor:
        """Transformer Engine's, which knows of quantised tensors."""
        return self._te.checkpoint(module, x, *others, use_reentrant=False)
