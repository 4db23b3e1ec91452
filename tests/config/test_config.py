"""The strict reader and the rules: what is right is read exactly, what is wrong is named with key, value and remedy."""

import pytest

from megaasync.config import Config, ConfigError, did_you_mean, dotted_keys, read, validate
from megaasync.update_rules.kinds.adamw import AdamWConfig
from megaasync.update_rules.kinds.muon import MuonConfig
from tests.support.configs import plain_config, small_config


def test_a_whole_config_is_read():
    config = small_config("adamw", train__global_batch_size=12, train__micro_batch_size=3)
    assert isinstance(config.optimizer, AdamWConfig)
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.num_microbatches == 4
    assert config.world_size == 1
    assert isinstance(small_config("muon").optimizer, MuonConfig)


def test_configs_are_frozen():
    with pytest.raises(AttributeError):
        small_config().train.steps = 3


def test_numbers_as_yaml_gives_them():
    """1e-3 without a point is text in YAML 1.1; a whole number is a fine float; a float is no whole number."""
    assert small_config(optimizer__lr="1e-3").optimizer.lr == 1e-3
    assert small_config(optimizer__lr=1).optimizer.lr == 1.0
    for wrong in (2.5, True, "7", None):
        with pytest.raises(ConfigError, match="train.steps="):
            small_config(train__steps=wrong)
    with pytest.raises(ConfigError, match="debug=1: expected true or false"):
        small_config(debug=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train__stepss": 3}, "train.stepss=3: unknown key; did you mean train.steps"),
        ({"model__moe__topk": 3}, "model.moe.topk=3: unknown key; did you mean model.moe.top_k"),
        (
            {"optimizer__name": "moon"},
            "optimizer=moon: unknown optimizer; did you mean muon.*choose .*adamw, .*normuon, .* or torch",
        ),
        ({"optimizer__betas": [0.9]}, r"optimizer.betas=\[0.9\]: expected a list of 2 values"),
        ({"optimizer__betas": [0.9, 1.0]}, r"optimizer.betas\[1\]=1: must lie in"),
        ({"schedule__name": "2bww"}, "schedule.name=2bww: unknown value; did you mean 2bw"),
        ({"model__moe": 3}, "model.moe=3: expected a group of keys"),
        ({"parallel__data": "all"}, "parallel.data"),
        ({"train__steps": 0}, "train.steps=0: must be at least 1"),
        ({"train__steps": -4}, "train.steps=-4: must be at least 1"),
        ({"model__num_heads": 3}, "model.num_heads=3: must divide model.hidden_size=16"),
        ({"model__num_heads": 16, "model__num_kv_heads": 16}, "model.num_heads=16: the head size 1 .* must be even"),
        ({"model__num_kv_heads": 3}, "model.num_kv_heads=3: must divide model.num_heads=4"),
        ({"model__moe__top_k": 5}, "model.moe.top_k=5: must be at most model.moe.num_experts=4"),
        ({"parallel__pipeline": 5}, "parallel.pipeline=5: more stages than model.num_layers=4"),
        ({"parallel__tensor": 4}, "parallel.tensor=4: must divide model.num_kv_heads=2, .*; set parallel.tensor=2"),
        ({"parallel__tensor": 2, "model__seq_length": 7}, "parallel.tensor=2: must divide model.seq_length=7"),
        ({"parallel__sequence_parallel": True}, "parallel.sequence_parallel=true: there is no other rank .* set"),
        ({"cluster__gpus_per_node": 8}, r"cluster.nodes=1: 1 x 8 ranks per node, but tensor\(1\) .* = 1 ranks; set"),
        ({"cluster__gpu_tflops": 0.0}, "cluster.gpu_tflops=0: must be above 0; set null"),
        (
            {"correction": {"name": "taylor", "strength": -1.0, "adaptive": False}},
            "correction.strength=-1: must be at least 0",
        ),
        (
            {"schedule__name": "1f1b", "correction": {"name": "taylor", "strength": 1.0, "adaptive": False}},
            "correction=taylor: corrects a gradient delay, but schedule=1f1b has none",
        ),
        ({"parallel__expert": 3}, "parallel.expert=3: must divide model.moe.num_experts=4, .*; set parallel.expert=1"),
        ({"parallel__data": 8}, "must be a multiple of micro_batch_size x data x expert = 2 x 8 = 16; set .*=16"),
        ({"model__moe__capacity_factor": 0.0}, "model.moe.capacity_factor=0: must be above 0; set null"),
        ({"model__moe__z_loss": -1.0}, "model.moe.z_loss=-1: must be at least 0"),
        ({"model__moe__score_function": "relu"}, "model.moe.score_function=relu: unknown value"),
        ({"train__global_batch_size": 7}, "train.global_batch_size=7: must be a multiple of .* = 2; set .*=(6|8)"),
        (
            {"parallel__pipeline": 4, "train__global_batch_size": 4},
            r"2bw needs m >= P - 1 = 3 microbatches.*deadlock.*; here m = 2 .*set train.global_batch_size=6",
        ),
        (
            {"schedule__name": "1f1b", "correction__name": "error_feedback"},
            "correction=error_feedback: corrects a gradient delay, but schedule=1f1b has none",
        ),
        ({"optimizer__lr": -1.0}, "optimizer.lr=-1: must be at least 0"),
        ({"optimizer__eps": 0.0}, "optimizer.eps=0: must be above 0"),
        ({"optimizer__momentum": 1.0}, "optimizer.momentum=1: must lie in"),
        ({"train__clip_grad_norm": 0.0}, "train.clip_grad_norm=0: must be above 0; set null"),
        ({"train__final_lr_ratio": 1.5}, "train.final_lr_ratio=1.5: must lie in"),
        (
            {"schedule__name": "pipedream", "parallel__pipeline": 2},
            "defined for m = 1 .*; here m = 4 .* set train.micro_batch_size=8",
        ),
        (
            {
                "schedule__name": "pipedream",
                "parallel__pipeline": 2,
                "train__micro_batch_size": 8,
                "model__tie_embeddings": True,
            },
            "schedule=pipedream: pipedream cannot tie the embeddings.*; set model.tie_embeddings=false",
        ),
        (
            {"schedule__name": "interleaved_1f1b", "parallel__pipeline": 2, "train__global_batch_size": 6},
            "groups of P = 2, and m = 3 .* set train.global_batch_size=8",
        ),
        ({"schedule__name": "zbv", "parallel__pipeline": 4}, "pipeline=4: more stages x 2 stages per rank = 8 than"),
        (
            {"schedule__name": "zbv", "model__num_layers": 1, "model__moe": None},
            "parallel.pipeline=1: more stages x 2 .* = 2 than model.num_layers=1; set model.num_layers=2 or more",
        ),
        ({"parallel__virtual_stages": 2}, r"2bw has 1 stage\(s\) per rank, not 2; set parallel.virtual_stages=1"),
        ({"schedule__name": "gpipe", "schedule__extra_in_flight": 1}, "gpipe has no extra forwards in flight; 1f1b"),
        ({"schedule__name": "1f1b", "schedule__sync_start_steps": 2}, "1f1b is synchronous all the time"),
        (
            {"schedule__sync_start_steps": 5, "schedule__sync_cooldown_steps": 7},
            "sync_start_steps=5 and .*_steps=7 leave no step of train.steps=12 to 2bw; set train.steps=13",
        ),
        (
            {"parallel__pipeline": 2, "parallel__layers_per_stage": [3, 2]},
            r"layers_per_stage=\[3, 2\]: must be 2 numbers of at least 1 that sum to model.num_layers=4",
        ),
        ({"parallel__layers_per_stage": 4}, "parallel.layers_per_stage=4: expected a list"),
        (
            {"schedule__delay": [1, 1]},
            "has 2 delays for 1 stage.*set schedule=interleaved_2bw parallel.virtual_stages=2",
        ),
        ({"schedule__delay": [-1]}, "every stage but the last one needs a delay of at least 1"),
        (
            {"schedule__delay": [1, 0, 1], "schedule__name": "interleaved_2bw", "parallel__virtual_stages": 3},
            "every stage but the last one needs a delay of at least 1",
        ),
        ({"schedule__delay": [1], "parallel__pipeline": 2}, "is for studies on one rank.*set schedule.delay=null"),
        ({"schedule__delay": [0], "schedule__name": "1f1b"}, "is for studies on one rank"),
        ({"parallel__timeout_seconds": 0.0}, "parallel.timeout_seconds=0: must be above 0"),
        ({"data__num_tokens": 8}, "data.num_tokens=8: must be above model.seq_length=8"),
        ({"data__branching": 65}, "data.branching=65: must be at most model.vocab_size=64"),
        ({"data": {"name": "indexed", "path": "", "validation_path": None}}, "data.path is empty"),
        (
            {"data": {"name": "python_stdlib", "cache_dir": "x", "validation_fraction": 0.1, "tokenizer_bytes": 9999}},
            "model.vocab_size=64: a tokenizer with byte fallback needs at least 400",
        ),
    ],
)
def test_wrong_values_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        small_config(**overrides)


def test_a_missing_key_is_named():
    plain = plain_config()
    del plain["train"]["seed"]
    with pytest.raises(ConfigError, match="train.seed: missing; set train.seed="):
        validate(read(Config, plain))


def test_a_key_of_another_optimizer_is_unknown():
    with pytest.raises(ConfigError, match="optimizer.momentum=0.9: unknown key"):
        small_config("adamw", optimizer__momentum=0.9)


def test_helpers():
    assert did_you_mean("adamww", ["adamw", "muon"]) == "; did you mean adamw?"
    assert did_you_mean("zzz", ["adamw"]) == ""
    assert {"train.steps", "model.moe.top_k", "optimizer.momentum", "data.path"} <= set(dotted_keys(Config))
