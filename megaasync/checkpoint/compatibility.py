"""Which settings of a run must be those of the checkpoint that it goes on from; needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaasync.config.identity import without
from megaasync.config.plain import in_current_form, to_plain
from megaasync.config.schema import Config, ConfigError
from megaasync.data.identity import Identity, check_identity
from megaasync.optim.lr_schedule import LrShape, lr_multiplier

FORMAT = 1
# settings of the training that a resumed run may have otherwise only with checkpoint.override=true
_OF_TRAINING = (
    *(("train", name) for name in ("global_batch_size", "seed", "lr_schedule", "warmup_steps", "final_lr_ratio")),
    *(("train", name) for name in ("decay_steps", "clip_grad_norm", "document_mask")),
    ("optimizer", "lr"),
    ("optimizer", "weight_decay"),
)
_FREE = ("lr", "weight_decay", "newton_schulz_precision")  # of the optimizer: the last one changes rounding only
_OF_RUN = ("cache_dir",)  # keys that say where something is, not what


def check_settings(
    meta: Mapping[str, Any],
    config: Config,
    path: Path,
    *,
    data: Identity | None = None,
) -> None:
    """The model, the optimizer and the data are the checkpoint's; with checkpoint.override other settings may differ.

    Args:
        meta: what the checkpoint says about itself.
        config: of the run.
        path: of the checkpoint.
        data: hashes of the run's tokens and tokenizer; None where nobody has computed them.

    Raises:
        ConfigError: names both values.
    """
    if meta.get("format") != FORMAT:
        raise ConfigError(f"checkpoint {path}: has format {meta.get('format')}, this program reads {FORMAT}")
    then, plain = in_current_form(meta["config"]), to_plain(config)
    end, override = config.train.steps, config.checkpoint.override
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
    differ("optimizer", without(plain["optimizer"], _FREE), without(then["optimizer"], _FREE), other)
    if override:
        return
    remedy = "set it back, or checkpoint.override=true to go on with the new one"
    for group, name in _OF_TRAINING:
        differ(f"{group}.{name}", plain[group].get(name), then[group].get(name), remedy)
    _check_lr_horizon(meta["step"], then, config, path)
    if data is not None:  # the content counts, wherever it lies
        # older runs cut text otherwise: their tokenizers saw less of it, and documents were held out by row numbers
        is_known = config.data.name in ("synthetic", "indexed")
        check_identity(meta.get("data"), data, where=f"checkpoint {path}", override=override, is_known=is_known)
    new = ("tokenizer_bytes", *(("path", "validation_path", "tokenizer") if data and meta.get("data") else ()))
    ours, theirs = (without(without(written["data"], _OF_RUN), new) for written in (plain, then))
    differ("data", ours, theirs, remedy)


def _check_lr_horizon(done: int, then: Mapping[str, Any], config: Config, path: Path) -> None:
    """A run with more steps keeps the learning rates that it has had, and the one that its last update waits for.

    Raises:
        ConfigError: the schedule would be stretched.
    """
    before, now = LrShape.of_plain(then["train"]), LrShape.of(config.train)
    if before.lr_horizon == now.lr_horizon or now.lr_schedule == "constant":
        return
    if now.lr_schedule != "cosine" and all(lr_multiplier(before, k) == lr_multiplier(now, k) for k in range(done)):
        return  # wsd that has not begun to decay
    lr_then, lr_now = (config.optimizer.lr * lr_multiplier(shape, max(done - 1, 0)) for shape in (before, now))
    key = "train.steps" if config.train.lr_schedule_steps is None else "train.lr_schedule_steps"
    raise ConfigError(
        f"{key}={now.lr_horizon}: the checkpoint {path} was made with the {now.lr_schedule} lr schedule over "
        f"{before.lr_horizon} steps; stretched to {now.lr_horizon} the lr at step {done} would be {lr_now:.3g} instead "
        f"of {lr_then:.3g}; set train.lr_schedule_steps={before.lr_horizon} to keep the schedule, or "
        "checkpoint.override=true to stretch it from here on"
    )
