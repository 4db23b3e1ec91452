"""What the adapter passes to Transformer Engine, and what a release must take for it; imports neither.

Releases differ in names, in what a name takes, and in the type of an argument whose name stays. At a start the
installed modules are asked (`installed_signature`); an image is checked from its sources (tools.bench.te_signatures),
where no GPU is needed. Releases 2.14 to 2.20 are known.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TE = "transformer_engine.pytorch"
ROUTER = f"{TE}.router"
RECIPES = "transformer_engine.common.recipe"

# By module, name and method ("" for the name itself): the keywords that are passed, or bound by their place.
NEEDED: Mapping[tuple[str, str, str], tuple[str, ...]] = {
    (TE, "Linear", ""): (
        "in_features", "out_features", "bias", "sequence_parallel", "tp_group", "tp_size", "parallel_mode",
        "fuse_wgrad_accumulation", "params_dtype", "device", "delay_wgrad_compute",
    ),
    (TE, "Linear", "forward"): ("inp",),
    (TE, "Linear", "backward_dw"): (),
    (TE, "GroupedLinear", ""): (
        "num_gemms", "in_features", "out_features", "bias", "fuse_wgrad_accumulation", "params_dtype", "device",
        "delay_wgrad_compute", "save_original_input",
    ),
    (TE, "GroupedLinear", "forward"): ("inp", "m_splits"),
    (TE, "GroupedLinear", "backward_dw"): (),
    (TE, "RMSNorm", ""): ("normalized_shape", "eps", "sequence_parallel", "params_dtype"),
    (TE, "DotProductAttention", ""): (
        "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type",
        "sequence_parallel", "tp_size", "tp_group",
    ),
    (TE, "DotProductAttention", "forward"): (
        "query_layer", "key_layer", "value_layer", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q",
        "max_seqlen_kv", "attn_mask_type",
    ),
    (TE, "Fp8Padding", ""): ("num_gemms",),
    (TE, "Fp8Padding", "forward"): ("inp", "m_splits"),
    (TE, "Fp8Unpadding", ""): ("num_gemms",),
    (TE, "Fp8Unpadding", "forward"): ("inp", "m_splits"),
    (TE, "moe_permute", ""): ("inp", "routing_map", "num_out_tokens", "map_type"),
    (TE, "moe_unpermute", ""): ("inp", "row_id_map", "merging_probs", "map_type"),
    (TE, "parallel_cross_entropy", ""): ("inp", "target", "reduce_loss", "dist_process_group", "ignore_idx"),
    (TE, "autocast", ""): ("enabled", "recipe"),
    (TE, "checkpoint", ""): (),
    (ROUTER, "fused_topk_with_score_function", ""): (
        "logits", "topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function",
        "expert_bias",
    ),
}  # fmt: skip

SignatureOf = Callable[[str, str, str], inspect.Signature]


@dataclass(frozen=True, slots=True)
class Features:
    """What a release has of the things that the adapter can do without.

    Attributes:
        splits_on_host: GroupedLinear wants the rows of each expert as a list of numbers (below 2.19), for which the
            host waits, where later releases take a tensor.
        topk_indices: the fused router tells the chosen experts (2.19); else torch's router is used.
        overwrite_input: the fused cross entropy is told that it may use the memory of the logits (2.19).
    """

    splits_on_host: bool = False
    topk_indices: bool = True
    overwrite_input: bool = True


def installed_signature(module: str, name: str, method: str) -> inspect.Signature:
    """Of an installed name, or of a method of it, without `self`.

    Raises:
        AttributeError: there is no such name.
    """
    found = getattr(importlib.import_module(module), name)
    if not method:
        return inspect.signature(found)
    signature = inspect.signature(getattr(found, method))
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    return signature.replace(parameters=parameters)


def features_of(signature_of: SignatureOf) -> Features:
    """What a release has.

    Args:
        signature_of: gives the signature of (module, name, method).

    Raises:
        ImportError: it lacks something that is needed, or wants an argument that is not passed; says what.
    """
    signatures = {}
    for key, passed in NEEDED.items():
        try:
            signatures[key] = signature_of(*key)
        except (AttributeError, KeyError, ImportError):
            raise ImportError(f"it has no {_written(key)}") from None
        _check_one(key, signatures[key], passed)
    splits = signatures[TE, "GroupedLinear", "forward"].parameters["m_splits"]
    return Features(
        splits_on_host="tensor" not in _annotation(splits),
        topk_indices=_takes(signatures[ROUTER, "fused_topk_with_score_function", ""], "topk_indices"),
        overwrite_input=_takes(signatures[TE, "parallel_cross_entropy", ""], "overwrite_input"),
    )


def _check_one(key: tuple[str, str, str], signature: inspect.Signature, passed: tuple[str, ...]) -> None:
    lacking = [name for name in passed if not _takes(signature, name)]
    if lacking:
        raise ImportError(f"its {_written(key)} takes no {', '.join(lacking)}")
    if not passed:
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in kinds and name not in passed
    ]
    if wanted:
        raise ImportError(f"its {_written(key)} also wants {', '.join(wanted)}")


def _takes(signature: inspect.Signature, name: str) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return name in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _annotation(parameter: inspect.Parameter) -> str:
    """As text, in small letters: what is written in a source, or what Python has made of it."""
    found = parameter.annotation
    return "" if found is parameter.empty else str(found).lower()


def _written(key: tuple[str, str, str]) -> str:
    _, name, method = key
    return f"{name}.{method}" if method else name
