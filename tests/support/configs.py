"""Small configs for tests: those of hydra_configs, made smaller."""

import copy
import threading
from dataclasses import replace
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from megaasync.config import Config, read, validate
from megaasync.config.schema import MoeConfig
from megaasync.entry.help import config_folder

# What differs from hydra_configs, so that two ranks take steps in milliseconds and clipping, decay and warmup all act.
_SMALLER: dict[str, Any] = {
    "model": {
        "name": "test",
        "num_layers": 4,
        "hidden_size": 16,
        "ffn_hidden_size": 24,
        "vocab_size": 64,
        "seq_length": 8,
        "init_std": 0.1,
        "moe": {"ffn_hidden_size": 12, "num_shared_experts": 1, "first_dense_layers": 1},
    },
    "parallel": {"timeout_seconds": 60.0},
    "train": {
        "steps": 12,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seed": 3,
        "dtype": "float64",
        "clip_grad_norm": 0.5,
        "eval_sequences": 10,
        "warmup_steps": 4,
        "decay_steps": 5,
        "max_skipped": 3,
        "loss_chunk_tokens": 7,
    },
    "data": {"num_tokens": 6000, "branching": 3},
    "checkpoint": {"interval": None, "resume": "never"},
    "kernels": "torch",
    "device": "cpu",
}
_RATES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.5, "weight_decay": 0.1},
    "adamw": {"lr": 0.01},
    "muon": {"lr": 0.02},
    "nadam": {"lr": 0.01},
    "lion": {"lr": 0.003, "weight_decay": 0.3},
    "adan": {"lr": 0.01},
    "normuon": {"lr": 0.02},
    "mars": {"lr": 0.01},
    "torch": {"lr": 0.01},
    "soap": {"lr": 0.01, "refresh_interval": 7, "first_basis": 4, "largest_side": 1000},
}

# All that keeps experts evenly loaded, strong enough to be seen in the weights.
BALANCED: dict[str, Any] = {
    "model__moe__bias_update_rate": 0.02,
    "model__moe__sequence_balance_loss": 0.05,
    "model__moe__global_balance_loss": 0.05,
    "model__moe__z_loss": 0.01,
}


def _put(config: dict[str, Any], values: dict[str, Any]) -> None:
    """Set keys that are there; one that no YAML file has is a mistake of the test's."""
    for key, value in values.items():
        assert key in config, f"{key}: not in hydra_configs"
        if isinstance(value, dict) and isinstance(config[key], dict):
            _put(config[key], value)
        else:
            config[key] = value


_ONE_AT_A_TIME = threading.Lock()  # Hydra's own state is the process's, and some tests have threads


@cache
def _composed(optimizer: str) -> dict[str, Any]:
    groups = ["model=tiny_moe", f"optimizer={optimizer}", "schedule=2bw", "data=synthetic"]
    with _ONE_AT_A_TIME, initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = OmegaConf.to_container(compose("pretrain", groups), resolve=True)
    _put(config, _SMALLER | {"optimizer": _RATES.get(optimizer, {})})
    return config


def plain_config(optimizer: str = "muon", **overrides: Any) -> dict[str, Any]:
    """A small run as a plain dict; overrides are dotted keys with `__` for the dot."""
    config = copy.deepcopy(_composed(optimizer))
    for key, value in overrides.items():
        *path, last = key.split("__")
        place = config
        for part in path:
            place = place[part]
        place[last] = value
    return config


def small_config(optimizer: str = "muon", **overrides: Any) -> Config:
    """The same, read and validated."""
    return validate(read(Config, plain_config(optimizer, **overrides)))


def moe_config(**overrides: Any) -> MoeConfig:
    """The experts of a small config, with other values."""
    return replace(small_config().model.moe, **overrides)
