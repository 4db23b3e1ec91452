"""Which settings of a run must be those of the checkpoint that it goes on from; needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaasync.config.schema import ConfigError

FORMAT = 1
# settings of the training that a resumed run may have otherwise only with checkpoint.override=true
_OF_TRAINING = (
    *(("train", name) for name in ("global_batch_size", "seed", "lr_schedule", "warmup_steps", "final_lr_ratio")),
    *(("train", name) for name in ("decay_steps", "clip_grad_norm", "document_mask")),
    ("optimizer", "lr"),
    ("optimizer", "weight_decay"),
)
_BEFORE = {"document_mask": False}  # what older checkpoints do not say
_FREE = ("lr", "weight_decay", "newton_schulz_precision")  # of the optimizer: the last one changes rounding only
_OF_RUN = ("cache_dir",)  # keys that say where something is, not what


def _without(group: Any, names: Sequence[str]) -> Any:
    return {key: value for key, value in group.items() if key not in names} if isinstance(group, Mapping) else group


def check_settings(meta: Mapping[str, Any], plain: Mapping[str, Any], path: Path, *, override: bool) -> None:
    """The model, the optimizer and the data are the checkpoint's; with `override` other settings may differ.

    Raises:
        ConfigError: names both values.
    """
    if meta.get("format") != FORMAT:
        raise ConfigError(f"checkpoint {path}: has format {meta.get('format')}, this program reads {FORMAT}")
    then, end = meta["config"], plain["train"]["steps"]
    if meta["step"] > end:
        raise ConfigError(
            f"train.steps={end}: the checkpoint {path} has {meta['step']} steps already; set more train.steps"
        )

    def differ(key: str, now: Any, before: Any, remedy: str) -> None:
        if now != before:
            raise ConfigError(f"{key}={now}: the checkpoint {path} was made with {key}={before}; {remedy}")

    other = "a checkpoint cannot be resumed with another one"
    for key in sorted({*plain["model"], *then["model"]} - {"name"}):
        differ(f"model.{key}", plain["model"].get(key), then["model"].get(key), other)
    differ("train.dtype", plain["train"]["dtype"], then["train"]["dtype"], other)
    differ("optimizer", _without(plain["optimizer"], _FREE), _without(then["optimizer"], _FREE), other)
    if override:
        return
    remedy = "set it back, or checkpoint.override=true to go on with the new one"
    for group, name in _OF_TRAINING:
        differ(f"{group}.{name}", plain[group].get(name), then[group].get(name, _BEFORE.get(name)), remedy)
    differ("data", _without(plain["data"], _OF_RUN), _without(then["data"], _OF_RUN), remedy)
