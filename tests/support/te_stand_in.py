"""A stand-in for Transformer Engine: real signatures of a release (te_signatures), with torch's mathematics behind.

It records every call, refuses a keyword that the real source does not have, and keeps the real conventions that the
adapter must meet: sequence-parallel rows are scattered along the first dimension, weight gradients go to `main_grad`
and wait for `backward_dw` if they were told to, permuted rows of one expert come in no promised order.
"""

import functools
import json
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megaasync.kernels.te_contract import RECIPES, ROUTER, TE
from tools.bench.te_signatures import RELEASES, signature_of

FOLDER = Path(__file__).with_name("te_signatures")


def signatures(release):
    """What each name of a release takes, as its source says."""
    return json.loads((FOLDER / f"{release}.json").read_text())


class Recorder:
    """Calls by name, bound to the signatures of a release."""

    def __init__(self, release=RELEASES[-1]):
        self.calls, self.signatures = [], signatures(release)

    def signature_of(self, module, name, method=""):
        """The real one; KeyError for a name that the release has not."""
        return signature_of(self.signatures, module, name, "" if method == "__init__" else method)

    def __deepcopy__(self, memo):
        return self

    def bind(self, module, name, method, args, kwargs):
        """Record a call; TypeError for what the real one does not take."""
        bound = self.signature_of(module, name, method).bind(*args, **kwargs)
        self.calls.append((name, method, bound.arguments))
        return bound.arguments

    def names(self):
        return {name for name, _, _ in self.calls}


def copy_function(function):
    """Another function that does the same, for another signature."""

    @functools.wraps(function)
    def again(*args, **kwargs):
        return function(*args, **kwargs)

    return again


class _Product(torch.autograd.Function):
    """Rows times weights, by splits, with the collective of a row-parallel layer and its kind of weight gradient."""

    @staticmethod
    def forward(ctx, x, module, splits, *weights):
        ctx.module, ctx.splits, ctx.weights = module, splits, weights
        parts = x.split(splits) if splits is not None else (x,)
        ctx.saves_whole = splits is None or module.given["save_original_input"]
        ctx.save_for_backward(*((x,) if ctx.saves_whole else parts))
        y = torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])
        return module.leave(y)

    @staticmethod
    def backward(ctx, grad):
        saved, module = ctx.saved_tensors, ctx.module
        grad = module.enter_backward(grad)
        grads = grad.split(ctx.splits) if ctx.splits is not None else (grad,)
        parts = saved[0].split(ctx.splits) if ctx.saves_whole and ctx.splits is not None else saved
        x_grad = torch.cat([g @ w for g, w in zip(grads, ctx.weights, strict=True)])
        sums = [weight.main_grad for weight in ctx.weights]  # asked for now, as the real one does

        def finish():
            for total, g, part in zip(sums, grads, parts, strict=True):
                total.add_((g.flatten(0, -2).T @ part.flatten(0, -2)).to(total.dtype))

        if module.given.get("delay_wgrad_compute"):
            module.waiting.append(finish)
        else:
            finish()
        return (x_grad, None, None, *[None] * len(ctx.weights))


class _Module(nn.Module):
    def __init__(self, recorder, name, args, kwargs):
        super().__init__()
        self.recorder, self.name, self.waiting = recorder, name, []
        self.given = recorder.bind(TE, name, "__init__", args, kwargs)
        self.tp_group = self.given.get("tp_group")  # as the real one, which says nothing of how to copy it
        if self.name in ("Linear", "GroupedLinear"):
            assert self.given["fuse_wgrad_accumulation"] and self.given["bias"] is False

    @property
    def is_row(self):
        return self.given.get("parallel_mode") == "row"

    def leave(self, y):
        if not self.is_row:
            return y
        group, size = self.given["tp_group"], self.given["tp_size"]
        if not self.given["sequence_parallel"]:
            y = y.clone()
            dist.all_reduce(y, group=group)
            return y
        assert y.shape[0] % size == 0
        mine = y.new_empty(y.shape[0] // size, *y.shape[1:])
        dist.reduce_scatter_tensor(mine, y.contiguous(), group=group)
        return mine

    def enter_backward(self, grad):
        if not self.is_row or not self.given["sequence_parallel"]:
            return grad
        whole = grad.new_empty(grad.shape[0] * self.given["tp_size"], *grad.shape[1:])
        dist.all_gather_into_tensor(whole, grad.contiguous(), group=self.given["tp_group"])
        return whole

    def backward_dw(self):
        self.recorder.bind(TE, self.name, "backward_dw", (), {})
        self.waiting.pop(0)()


def _parameter(given, rows, cols):
    return nn.Parameter(torch.empty(rows, cols, dtype=given["params_dtype"], device=given["device"]).normal_())


def make_engine(recorder):
    """transformer_engine.pytorch, and the modules beside it, by name."""

    class Linear(_Module):
        def __init__(self, *args, **kwargs):
            super().__init__(recorder, "Linear", args, kwargs)
            width = self.given["in_features"] // (self.given["tp_size"] if self.is_row else 1)
            self.weight = _parameter(self.given, self.given["out_features"], width)

        def forward(self, *args, **kwargs):
            given = recorder.bind(TE, "Linear", "forward", args, kwargs)
            return _Product.apply(given["inp"], self, None, self.weight)

    class GroupedLinear(_Module):
        def __init__(self, *args, **kwargs):
            super().__init__(recorder, "GroupedLinear", args, kwargs)
            for number in range(self.given["num_gemms"]):
                shape = self.given["out_features"], self.given["in_features"]
                self.register_parameter(f"weight{number}", _parameter(self.given, *shape))

        def forward(self, *args, **kwargs):
            given = recorder.bind(TE, "GroupedLinear", "forward", args, kwargs)
            splits = given["m_splits"]
            if "List" in recorder.signature_of(TE, "GroupedLinear", "forward").parameters["m_splits"].annotation:
                assert type(splits) is list and len(splits) == self.given["num_gemms"]
            else:
                assert splits.dtype is torch.int64 and splits.shape == (self.given["num_gemms"],)
                splits = splits.tolist()
            weights = [getattr(self, f"weight{number}") for number in range(self.given["num_gemms"])]
            return _Product.apply(given["inp"], self, splits, *weights)

    class RMSNorm(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            given = recorder.bind(TE, "RMSNorm", "__init__", args, kwargs)
            self.eps = given["eps"]
            self.weight = nn.Parameter(torch.ones(given["normalized_shape"], dtype=given["params_dtype"]))

        def forward(self, x):
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    class DotProductAttention(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            self.given = dict(recorder.bind(TE, "DotProductAttention", "__init__", args, kwargs))
            self.tp_group = self.given["tp_group"]
            assert self.given["qkv_format"] == "bshd" and self.given["attn_mask_type"] == "causal"
            assert self.given["num_attention_heads"] % self.given["tp_size"] == 0

        def forward(self, *args, **kwargs):
            given = recorder.bind(TE, "DotProductAttention", "forward", args, kwargs)
            heads, groups = (self.given[n] // self.given["tp_size"] for n in ("num_attention_heads", "num_gqa_groups"))
            q, k, v = (given[f"{name}_layer"] for name in ("query", "key", "value"))
            assert q.shape[-2] == heads and k.shape[-2] == v.shape[-2] == groups
            if given.get("qkv_format") == "thd":
                assert given["attn_mask_type"] == "padding_causal" and q.dim() == 3
                ends = given["cu_seqlens_q"]
                assert ends.dtype is torch.int32 and given["cu_seqlens_kv"] is ends
                sizes = (ends[1:] - ends[:-1]).tolist()
                assert max(sizes) <= given["max_seqlen_q"] == given["max_seqlen_kv"] and sum(sizes) == len(q)
                documents = zip(*(item.split(sizes) for item in (q, k, v)), strict=True)
                return torch.cat([self.attend(*(item.unsqueeze(0) for item in document))[0] for document in documents])
            return self.attend(q, k, v)

        @staticmethod
        def attend(q, k, v):
            mixed = F.scaled_dot_product_attention(
                *(item.transpose(1, 2) for item in (q, k, v)), is_causal=True, enable_gqa=True
            )
            return mixed.transpose(1, 2).flatten(2)

    class Padding(nn.Module):
        name = "Fp8Padding"

        def __init__(self, *args, **kwargs):
            super().__init__()
            recorder.bind(TE, self.name, "__init__", args, kwargs)

        def forward(self, *args, **kwargs):
            given = recorder.bind(TE, self.name, "forward", args, kwargs)
            sizes = [-(-size // 16) * 16 for size in given["m_splits"]]
            parts = zip(given["inp"].split(given["m_splits"]), sizes, strict=True)
            return torch.cat([F.pad(part, (0, 0, 0, size - len(part))) for part, size in parts]), sizes

    class Unpadding(Padding):
        name = "Fp8Unpadding"

        def forward(self, *args, **kwargs):
            given = recorder.bind(TE, self.name, "forward", args, kwargs)
            padded = [-(-size // 16) * 16 for size in given["m_splits"]]
            parts = zip(given["inp"].split(padded), given["m_splits"], strict=True)
            return torch.cat([part[:size] for part, size in parts])

    def moe_permute(*args, **kwargs):
        given = recorder.bind(TE, "moe_permute", "", args, kwargs)
        experts = given["routing_map"]
        assert experts.dtype is torch.int32 and given["map_type"] == "index"
        assert given["num_out_tokens"] == experts.numel()
        # by expert, and of one expert the last token first
        order = (experts.flatten().long() * experts.numel() - torch.arange(experts.numel())).argsort()
        return given["inp"][order // experts.shape[1]], order.to(torch.int32)

    def moe_unpermute(*args, **kwargs):
        given = recorder.bind(TE, "moe_unpermute", "", args, kwargs)
        weights, order = given["merging_probs"], given["row_id_map"].long()
        assert given["map_type"] == "index" and weights.dtype in (torch.float32, torch.float64)
        chosen = torch.zeros_like(given["inp"]).index_copy(0, order, given["inp"])
        return (chosen.view(*weights.shape, -1) * weights.unsqueeze(-1).to(chosen.dtype)).sum(dim=1)

    def fused_topk_with_score_function(*args, **kwargs):
        given = recorder.bind(f"{TE}.router", "fused_topk_with_score_function", "", args, kwargs)
        logits, top_k, bias = given["logits"], given["topk"], given["expert_bias"]
        if given["score_function"] == "sigmoid":
            scores = logits.sigmoid()
            chosen = (scores if bias is None else scores + bias).topk(top_k, dim=-1).indices
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(dim=-1, keepdim=True) if top_k > 1 else weights
        else:
            assert bias is None
            scores = logits.softmax(dim=-1) if given["use_pre_softmax"] else logits
            weights, chosen = scores.topk(top_k, dim=-1)
            weights = weights if given["use_pre_softmax"] else weights.softmax(dim=-1)
        given["topk_indices"].copy_(chosen)
        return torch.zeros_like(logits).scatter(1, chosen, weights), given["topk_indices"]

    class _CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, labels, group, ignored):
            columns = logits.shape[-1]
            start = 0 if group is None else dist.get_rank(group) * columns
            largest = logits.amax(dim=-1)
            here = (labels >= start) & (labels < start + columns)
            column = (labels - start).where(here, 0).unsqueeze(-1)
            label_logits = logits.gather(-1, column).squeeze(-1).where(here, 0)
            if group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            sums = (logits - largest.unsqueeze(-1)).exp().sum(dim=-1)
            if group is not None:
                dist.all_reduce(sums, group=group)
                dist.all_reduce(label_logits, group=group)
            valid = labels != ignored
            softmax = (logits - largest.unsqueeze(-1)).exp() / sums.unsqueeze(-1)
            grad = softmax.scatter_add(-1, column, -here.to(softmax.dtype).unsqueeze(-1)) * valid.unsqueeze(-1)
            ctx.save_for_backward(grad)
            logits.fill_(float("nan"))  # overwrite_input: nobody may look at it again
            return (sums.log() + largest - label_logits) * valid

        @staticmethod
        def backward(ctx, grad):
            (made,) = ctx.saved_tensors
            return made * grad.unsqueeze(-1), None, None, None

    def parallel_cross_entropy(*args, **kwargs):
        given = recorder.bind(TE, "parallel_cross_entropy", "", args, kwargs)
        assert given["inp"].dim() == 3 and given["inp"].is_contiguous() and given["reduce_loss"] is False
        return _CrossEntropy.apply(given["inp"], given["target"], given["dist_process_group"], given["ignore_idx"])

    class autocast:
        def __init__(self, *args, **kwargs):
            recorder.bind(TE, "autocast", "__init__", args, kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    def checkpoint(*args, **kwargs):
        recorder.bind(TE, "checkpoint", "", args, kwargs)
        assert kwargs == {"use_reentrant": False}
        return torch_checkpoint(*args, **kwargs)

    te, router, recipes = (ModuleType(name) for name in (TE, f"{TE}.router", "transformer_engine.common.recipe"))
    for item in (Linear, GroupedLinear, RMSNorm, DotProductAttention, moe_permute, moe_unpermute, autocast, checkpoint):
        setattr(te, item.__name__, item)
    te.parallel_cross_entropy, te.Fp8Padding, te.Fp8Unpadding = parallel_cross_entropy, Padding, Unpadding
    te.router = router
    router.fused_topk_with_score_function = fused_topk_with_score_function
    for name in ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"):
        setattr(recipes, name, type(name, (), {}))
    modules = {TE: te, ROUTER: router, RECIPES: recipes}
    for key in recorder.signatures:
        module, name, *method = key.split()
        owner = getattr(modules[module], name)
        signed = getattr(owner, method[0]) if method else owner
        if method and method[0] not in vars(owner):  # a base's, which other classes share
            signed = copy_function(signed)
            setattr(owner, method[0], signed)
        signed.__signature__ = recorder.signature_of(module, name, *method)
    return modules


def install(recorder):
    """Make it what this process imports."""
    modules = make_engine(recorder)
    packages = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.common")}
    sys.modules.update(packages | modules)
    sys.modules["transformer_engine"].pytorch = modules[TE]
