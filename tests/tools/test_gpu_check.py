"""tools/gpu_check.py on the CPU, on a machine that has torch and numpy only, and its way to read configs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

REPOSITORY = Path(__file__).parents[2]

from megaasync.plan.plan import make_plan  # noqa: E402
from tests.support.configs import small_config  # noqa: E402
from tools.bench.gpu_checks import Place, _memory  # noqa: E402
from tools.bench.plain_config import compose, read_simple  # noqa: E402
from tools.command_line import compose_plain  # noqa: E402

CONFIGS = sorted((REPOSITORY / "hydra_configs").rglob("*.yaml"))

NOTHING_ELSE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hydra", "omegaconf", "rich", "yaml", "sentencepiece", "matplotlib", "datasets",
                                  "wandb", "tokenizers", "safetensors", "megaasync.egg-info"):
            raise ModuleNotFoundError(f"{name} is not on this machine")

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_simple_reading_is_yaml(path):
    expected = yaml.safe_load(path.read_text()) or {}
    assert read_simple(path) == {key: value for key, value in expected.items() if key not in ("defaults", "hydra")}


def test_composing_is_hydra_s():
    groups = {"model": "moe_10b", "optimizer": "adamw", "schedule": "1f1b", "data": "synthetic"}
    expected = compose_plain([*(f"{k}={v}" for k, v in groups.items()), "train.steps=7", "model.moe.num_experts=8"])
    expected.pop("experiment", None)
    assert compose(groups, {"train.steps": 7, "model.moe.num_experts": 8}) == expected
    plain = compose_plain(["data=synthetic"])
    plain.pop("experiment", None)
    assert compose({"data": "synthetic"}, {}) == plain


def run_tool(tmp_path, *arguments):
    (tmp_path / "sitecustomize.py").write_text(NOTHING_ELSE)
    environment = dict(os.environ, PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    command = [sys.executable, str(REPOSITORY / "tools" / "gpu_check.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=environment, check=False
    )


def test_the_script_needs_torch_and_numpy_only(tmp_path):
    """Every backend of this machine is right against float64, and says what it skipped and why."""
    ran = run_tool(tmp_path, "--cpu", "only=correctness")
    assert ran.returncode == 0, ran.stderr
    (lines,) = json.loads((tmp_path / "runs" / "gpu_check" / "gpu_check.json").read_text())["checks"].values()
    met = {line["name"]: line["is_met"] for line in lines}
    assert list(met.values()) == [True] * 6 + [None]
    assert "skipped: no Transformer Engine here" in ran.stdout
    assert "| yes |" in ran.stdout


def test_memory_is_held_against_the_plan(tmp_path):
    """Only a GPU has the figure; its arithmetic is the same everywhere."""
    place = Place(torch.device("cuda"), tmp_path, 0.0)
    config = small_config()
    (rank,) = make_plan(config)["ranks"]
    for factor, is_met in ((1.0, True), (1.09, True), (1.2, False), (0.8, False)):
        outcome = SimpleNamespace(peak_memory_bytes=int(factor * rank["total_bytes"]))
        line = _memory(place, config, outcome)
        assert line.is_met is is_met and f"({factor:.2f})" in line.value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpu", "minutes=no"], "minutes=no: must be a number above 0"),
        (["--cpu", "only=everything"], "only=everything: unknown check; choose what is here, correctness"),
        (["--gpu"], "--gpu: unknown; give --cpu"),
        ([], "torch sees no CUDA device; run it on a GPU, or at toy size with --cpu"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, arguments, message):
    ran = run_tool(tmp_path, *arguments)
    assert ran.returncode == 2 and message in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.slow("engine")
def test_the_whole_script_at_toy_size(tmp_path):
    ran = run_tool(tmp_path, "--cpu", "minutes=8")
    assert ran.returncode == 0, ran.stderr
    checks = json.loads((tmp_path / "runs" / "gpu_check" / "gpu_check.json").read_text())["checks"]
    assert len(checks) == 7
    assert not any(line["value"].startswith("failed") for lines in checks.values() for line in lines)
    (overlap,) = checks["side stream"]
    assert int(overlap["value"].split("%")[0]) > 50
    print("\n" + ran.stdout[ran.stdout.index("| check") :])
