"""Text in YAML files and on the command line stays as it was written."""

import subprocess
import sys

import pytest
import yaml

from megaasync.config import Config, ConfigError, read, validate
from megaasync.entry.text_values import load_yaml, quoted_override, text_keys, yaml_mistake
from tests.support.cli import environment
from tests.support.configs import plain_config

WRITTEN = {
    "time": ["24:00:00", "12:30:00", "0600", "1-12", "90"],
    "account": ["1234", "0123", "1e3"],
    "partition": ["1", "on", "no"],
    "run_name": ["1.10", "2024_11"],
    "text_field": ["no", "1"],
    "mounts": ["[10:20]"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRITTEN.items() for value in values])
def test_text_in_a_yaml_file_is_read_as_it_is_written(key, value):
    read_back = load_yaml(f"{key}: {value}  # a comment\n")[key]
    assert read_back == ([value[1:-1]] if value.startswith("[") else value)


@pytest.mark.parametrize(
    "value", ["0123", "29:30", "1e3", "1.10", "true", "1_000", "+5", "0x1F", "2024-01-02", ".5", "nan"]
)
def test_environment_values_are_verbatim(value):
    assert load_yaml(f"env:\n  X: {value}\n  Y: null\n")["env"] == {"X": value, "Y": None}
    (override,) = [quoted_override(f"+cluster.env.X={value}")]
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(override).value() == value


@pytest.mark.parametrize("text", ["seed: 0123", "steps: 1:40", "time_limit: 24:00", "betas: [0.9, 010]", "lr: 1:30.5"])
def test_numbers_in_base_8_and_60_are_refused_with_their_place(text):
    with pytest.raises(yaml.YAMLError) as refused:
        load_yaml(f"train:\n  x: 1\n  {text}\n")
    assert "line 3" in yaml_mistake(refused.value) and "what it seems" in yaml_mistake(refused.value)


def test_an_anchor_of_a_number_and_a_text_is_both():
    read_back = load_yaml("train:\n  warmup_steps: &w 2\nlogging:\n  run_name: *w\n")
    assert read_back == {"train": {"warmup_steps": 2}, "logging": {"run_name": "2"}}
    for text in ("a: &a [1, *a]\n", "? [a, b]\n: 1\n"):
        with pytest.raises(yaml.YAMLError) as refused:
            load_yaml(text)
        assert "line 1" in yaml_mistake(refused.value)


def test_other_values_keep_their_types():
    assert load_yaml("lr: 1e-3\nsteps: 100\nnested: {tie_embeddings: true, x: 0, y: null, z: 0x10}") == {
        "lr": 0.001, "steps": 100, "nested": {"tie_embeddings": True, "x": 0, "y": None, "z": 16},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("cluster.account=1234", 'cluster.account="1234"'),
        ("run.dir=2024_11", 'run.dir="2024_11"'),
        ("run.dir=~/runs/x", 'run.dir="~/runs/x"'),
        ("logging.wandb.run_name=1.10", 'logging.wandb.run_name="1.10"'),
        ("run.dir=runs/x", "run.dir=runs/x"),
        ("run.dir=null", "run.dir=null"),
        ("run.dir='5'", "run.dir='5'"),
        ("run.dir=a,b", "run.dir=a,b"),
        ("run.dir=~/A,~/B", 'run.dir="~/A","~/B"'),
        ("run.dir=~/runs/${model.name}", 'run.dir="~/runs/${model.name}"'),
        ("logging.wandb.run_name=1.10,1e3,x", 'logging.wandb.run_name="1.10","1e3",x'),
        ("cluster.modules=[1.10,cuda]", 'cluster.modules=["1.10",cuda]'),
        ('cluster.modules=["1.10",2]', 'cluster.modules=["1.10",2]'),
        ("run.dir=choice(1,2)", "run.dir=choice(1,2)"),
        ("train.steps=10", "train.steps=10"),
        ("cluster.mounts=[/a:/b]", "cluster.mounts=[/a:/b]"),
        ("run.dir=a=b", "run.dir=a=b"),
        ("--cfg", "--cfg"),
    ],
)
def test_only_text_that_would_become_a_number_is_quoted(typed, expected):
    assert quoted_override(typed) == expected


def test_the_schema_says_what_is_text():
    assert {"cluster.time", "cluster.env", "data.path", "run.dir", "cluster.setup", "model.name"} <= text_keys()
    assert not {"train.steps", "parallel.data", "optimizer.lr", "optimizer.arguments", "train.dtype"} & text_keys()


SLURM = {
    "name": "slurm", "nodes": 1, "gpus_per_node": None, "gpu_memory_gib": None, "gpu_tflops": None,
    "network_gbytes": None, "tasks_per_node": 1, "requeue": False, "signal_seconds": 120, "container_image": None,
    "container_runtime": "pyxis", "python": None, "submit": True, "preflight": True, "check_files": True,
    "exclusive": False, "env": {},
    "mounts": [], "setup": [], "extra_sbatch": [], "secrets": [], "modules": [],
    **dict.fromkeys(
        ("gpus_per_task", "cpus_per_task", "job_name", "mem", "gres", "partition", "account", "qos", "constraint",
         "exclude", "reservation", "time", "comment", "mail_type", "mail_user", "dependency", "nice", "wckey")
    ),
}  # fmt: skip


def slurm(**changes):
    return validate(read(Config, plain_config(cluster={**SLURM, **changes}))).cluster


@pytest.mark.parametrize(
    "time", ["90", "90:30", "24:00:00", "2-12", "2-12:30", "2-12:30:15", "30-00:00:00", "unlimited", "INFINITE"]
)
def test_every_form_of_a_time_that_slurm_knows(time):
    assert slurm(time=time).time == time


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time": 86400}, ["cluster.time=86400", "60 days", "60-00:00:00", "24:00:00"]),
        ({"time": "45000"}, ["cluster.time=45000", "31-06:00:00"]),
        ({"time": "1:2:3:4"}, ["cannot be read", "days-hours"]),
        ({"time": 1.5}, ["cluster.time=1.5: expected text", "quotes"]),
        ({"account": True}, ["cluster.account=True: expected text", "quotes"]),
    ],
)
def test_numbers_beyond_sense_are_refused_with_the_remedy(changes, words):
    with pytest.raises(ConfigError) as refused:
        slurm(**changes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_users_whole_yaml_from_before_a_key_existed_still_does():
    new = {"gpus_per_task", "job_name", "mem", "gres", "comment", "mail_type", "mail_user", "dependency", "nice"}
    new |= {"wckey", "exclusive", "secrets", "modules", "check_files"}
    old = {name: value for name, value in SLURM.items() if name not in new}
    plain = plain_config(cluster=old)
    del plain["train"]["lr_schedule_steps"]
    config = validate(read(Config, plain))
    assert config.cluster == slurm() and config.train.lr_schedule_steps is None
    del old["nodes"]
    with pytest.raises(ConfigError, match=r"cluster\.nodes: missing"):
        read(Config, plain_config(cluster=old))


def test_digits_are_text_too():
    assert slurm(account=1234).account == "1234"


def test_a_mistake_in_a_users_yaml_names_file_and_line(tmp_path):
    (tmp_path / "optimizer").mkdir()
    for content, words in (
        ("name: adamw\nlr: [1\n", ["mine.yaml, line 3"]),
        ("name: adamw\nlr: 010\n", ["mine.yaml, line 2", "base 8"]),
        ("name: adamw\nlr: 1\nlr: 2\n", ["mine.yaml, line 3", "duplicate key lr"]),
    ):
        (tmp_path / "optimizer/mine.yaml").write_text(content)
        ran = subprocess.run(
            [sys.executable, "-m", "megaasync.pretrain", "--config-dir", str(tmp_path), "optimizer=mine"],
            env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ran.returncode == 2 and "Traceback" not in ran.stderr
        assert all(word in ran.stderr for word in words), ran.stderr
