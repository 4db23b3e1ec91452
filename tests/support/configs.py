"""Small configs as plain dicts, as Hydra would give them."""

import copy
from dataclasses import replace
from typing import Any

from megaasync.config import Config, read, validate
from megaasync.config.schema import MoeConfig

_OPTIMIZERS = {
    "sgd": {"name": "sgd", "lr": 0.5, "weight_decay": 0.1, "momentum": 0.0},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8},
    "muon": {
        "name": "muon",
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "newton_schulz_steps": 5,
        "newton_schulz_precision": "auto",
        "betas": [0.9, 0.95],
        "eps": 1e-8,
    },
    "nadam": {
        "name": "nadam",
        "lr": 0.01,
        "weight_decay": 0.1,
        "betas": [0.99, 0.999],
        "eps": 1e-8,
        "momentum_decay": 0.004,
    },
    "lion": {"name": "lion", "lr": 0.003, "weight_decay": 0.3, "betas": [0.9, 0.99]},
    "adan": {"name": "adan", "lr": 0.01, "weight_decay": 0.02, "betas": [0.98, 0.92, 0.99], "eps": 1e-8},
    "normuon": {
        "name": "normuon",
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "newton_schulz_steps": 5,
        "newton_schulz_precision": "auto",
        "beta2": 0.95,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
    },
    "mars": {
        "name": "mars",
        "lr": 0.01,
        "weight_decay": 0.1,
        "betas": [0.95, 0.99],
        "gamma": 0.025,
        "adamw_betas": [0.9, 0.95],
        "eps": 1e-8,
    },
    "torch": {
        "name": "torch",
        "target": "torch.optim.RMSprop",
        "arguments": {},
        "elementwise": True,
        "lr": 0.01,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
    },
    "soap": {
        "name": "soap",
        "lr": 0.01,
        "weight_decay": 0.1,
        "betas": [0.95, 0.95],
        "refresh_interval": 7,
        "first_basis": 4,
        "largest_side": 1000,
        "adamw_betas": [0.9, 0.95],
        "eps": 1e-8,
    },
}

_BASE: dict[str, Any] = {
    "model": {
        "name": "test",
        "num_layers": 4,
        "hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 24,
        "vocab_size": 64,
        "seq_length": 8,
        "tie_embeddings": False,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
        "init_std": 0.1,
        "qk_norm": False,
        "moe": {
            "num_experts": 4,
            "top_k": 2,
            "ffn_hidden_size": 12,
            "num_shared_experts": 1,
            "first_dense_layers": 1,
            "score_function": "softmax",
            "normalize_top_k": True,
            "capacity_factor": None,
            "bias_update_rate": 0.0,
            "sequence_balance_loss": 0.0,
            "global_balance_loss": 0.0,
            "z_loss": 0.0,
        },
    },
    "optimizer": _OPTIMIZERS["muon"],
    "schedule": {
        "name": "2bw",
        "sync_start_steps": 0,
        "sync_cooldown_steps": 0,
        "extra_in_flight": 0,
        "overlap_step": True,
        "delay": None,
    },
    "correction": {"name": "none"},
    "parallel": {
        "tensor": 1,
        "expert": 1,
        "pipeline": 1,
        "data": 1,
        "sequence_parallel": False,
        "virtual_stages": None,
        "layers_per_stage": None,
        "timeout_seconds": 60.0,
    },
    "train": {
        "steps": 20,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seed": 3,
        "dtype": "float64",
        "clip_grad_norm": 0.5,
        "eval_interval": None,
        "eval_sequences": 10,
        "lr_schedule": "cosine",
        "lr_schedule_steps": None,
        "warmup_steps": 4,
        "final_lr_ratio": 0.1,
        "decay_steps": 5,
        "on_nonfinite": "stop",
        "max_skipped": 3,
        "time_limit": None,
        "recompute": "none",
        "loss_chunk_tokens": 7,
        "document_mask": False,
        "fp8": "none",
    },
    "data": {"name": "synthetic", "num_tokens": 6000, "branching": 3},
    "checkpoint": {"interval": None, "keep": 2, "resume": "never", "async_save": True, "override": False},
    "logging": {
        "interval": 10,
        "trace": False,
        "spike_threshold": 8.0,
        "wandb": {"mode": "disabled", "project": "p", "run_name": None},
    },
    "cluster": {
        "name": "local",
        "nodes": 1,
        "gpus_per_node": None,
        "gpu_memory_gib": None,
        "gpu_tflops": None,
        "network_gbytes": None,
    },
    "run": {"dir": None, "max_restarts": 0},
    "kernels": "torch",
    "device": "cpu",
    "debug": False,
    "dry_run": False,
}


# All that keeps experts evenly loaded, strong enough to be seen in the weights.
BALANCED: dict[str, Any] = {
    "model__moe__bias_update_rate": 0.02,
    "model__moe__sequence_balance_loss": 0.05,
    "model__moe__global_balance_loss": 0.05,
    "model__moe__z_loss": 0.01,
}


def plain_config(optimizer: str = "muon", **overrides: Any) -> dict[str, Any]:
    """A small run as a plain dict; overrides are dotted keys with `__` for the dot."""
    config = copy.deepcopy(_BASE)
    config["optimizer"] = copy.deepcopy(_OPTIMIZERS[optimizer])
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
