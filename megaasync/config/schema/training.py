"""The training loop: group `train`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaasync.fields import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The training loop (group `train`).

    Attributes:
        steps: optimizer steps.
        global_batch_size, micro_batch_size: sequences.
        seed: of weights and data order.
        dtype: of weights and activations in compute; master weights are at least float32.
        clip_grad_norm: largest global gradient norm; null switches clipping off.
        eval_interval: steps between evaluations; null evaluates only at the end.
        eval_sequences: sequences of the validation set that an evaluation uses; null is all.
        lr_schedule: shape of the learning rate over the steps.
        lr_schedule_steps: steps that cosine and wsd run over, after which the lr stays; null takes steps.
        warmup_steps: linear warmup.
        final_lr_ratio: lr at the last step over the peak, for cosine and wsd.
        decay_steps: length of the final decay of wsd.
        on_nonfinite: what to do about a batch whose loss or gradient norm is not finite: `stop`, or `skip` it.
        max_skipped: with `skip`, how many in all; the next one stops.
        time_limit: seconds after which the run saves and ends, as at a signal; null for none.
        recompute: activations that the backward makes again instead of keeping them: `none`; `selective`, all but
            matrix products; `full`, all of a layer but its input.
        loss_chunk_tokens: tokens whose logits are held at once; null holds those of a whole microbatch.
        document_mask: tokens attend within their own document only, and not over the whole sequence.
        fp8: recipe of the layers' matrix products, with kernels=te: `current` scales by each tensor, `block` and
            `mxfp8` by blocks of it; `none` computes in dtype.
        deterministic: on a GPU, algorithms that repeat bit for bit, and are slower; a CPU's do anyway.
    """

    steps: Annotated[int, Range(at_least=1)]
    global_batch_size: Annotated[int, Range(at_least=1)]
    micro_batch_size: Annotated[int, Range(at_least=1)]
    seed: Annotated[int, Range(at_least=0)]
    dtype: Literal["float64", "float32", "bfloat16"]
    clip_grad_norm: Annotated[float | None, Range(above=0, remedy="set null to switch clipping off")]
    eval_interval: Annotated[int | None, Range(at_least=1)]
    eval_sequences: Annotated[int | None, Range(at_least=1)]
    lr_schedule: Literal["constant", "cosine", "wsd"]
    lr_schedule_steps: Annotated[int | None, Range(at_least=1)] = None
    warmup_steps: Annotated[int, Range(at_least=0)]
    final_lr_ratio: Annotated[float, Range(at_least=0, at_most=1)]
    decay_steps: Annotated[int, Range(at_least=0)]
    on_nonfinite: Literal["stop", "skip"]
    max_skipped: Annotated[int, Range(at_least=0)]
    time_limit: Annotated[float | None, Range(above=0, remedy="these are seconds; set null for no limit")]
    recompute: Literal["none", "selective", "full"] = "none"
    loss_chunk_tokens: Annotated[int | None, Range(at_least=1)] = 1024
    document_mask: bool = False
    fp8: Literal["none", "current", "block", "mxfp8"] = "none"
    deterministic: bool = False
