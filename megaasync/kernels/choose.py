"""Which backend a run computes with: torch's own, or Transformer Engine where it is asked for or found."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from megaasync.config.schema import Config, ConfigError
from megaasync.kernels.backend import Kernels
from megaasync.kernels.te_contract import Features, features_of, installed_signature

_BROKEN = (ImportError, RuntimeError, OSError, AssertionError, AttributeError)  # what a broken install raises
_REMEDY = "use NVIDIA's PyTorch container, or pip install --no-build-isolation 'transformer_engine[pytorch]'"


def import_transformer_engine() -> tuple[ModuleType, Features]:
    """`transformer_engine.pytorch`, and what its release has.

    Raises:
        ModuleNotFoundError: it is not installed.
        ImportError: it is, and does not work, or its release is not one that the adapter can use; says why, in one
            line.
    """
    try:
        engine = importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine.pytorch.router")  # which the former does not import
    except _BROKEN as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImportError(f"installed, but it cannot be imported ({reason[:200]})") from error
    try:
        return engine, features_of(installed_signature)
    except ImportError as error:
        raise ImportError(f"of a release ({_version()}) that cannot be used ({error}); 2.14 to 2.20 can") from error


def _version() -> str:
    """Of the installed Transformer Engine."""
    for name in ("transformer_engine", "transformer-engine"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "unknown"


def choose_kernels(
    config: Config,
    *,
    reference: Kernels,
    device: torch.device,
    splits_backward: bool,
    notify: Callable[[str], None],
) -> Kernels:
    """The backend that `kernels=` means on a device.

    Args:
        config: of the run.
        reference: torch's own.
        device: of this rank.
        splits_backward: the schedule has weight gradients apart.
        notify: told what `auto` found, if it is not what one would expect.

    Raises:
        ConfigError: Transformer Engine was asked for and cannot be had.
    """
    is_asked_for, is_worth_it = config.kernels == "te", device.type == "cuda" and config.train.dtype == "bfloat16"
    if config.kernels == "torch" or not (is_asked_for or is_worth_it):
        return reference
    try:
        engine, features = import_transformer_engine()
    except ModuleNotFoundError:
        if is_asked_for:
            raise ConfigError(
                f"kernels=te: Transformer Engine is not installed; {_REMEDY}, or set kernels=torch"
            ) from None
        return reference
    except ImportError as error:
        if is_asked_for:
            raise ConfigError(f"kernels=te: Transformer Engine is {error}; {_REMEDY}, or set kernels=torch") from error
        notify(f"Transformer Engine is {error}; going on with kernels=torch")
        return reference
    adapter = importlib.import_module("megaasync.kernels.transformer_engine")
    return adapter.TransformerEngineKernels(
        engine,
        reference=reference,
        dtype=getattr(torch, config.train.dtype),
        device=device,
        splits_backward=splits_backward,
        fp8=config.train.fp8,
        features=features,
    )
