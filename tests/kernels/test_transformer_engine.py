"""The adapter against Transformer Engine's real signatures, and through a stand-in made of them the reference."""

import ast
import copy
import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megaasync.config import ConfigError, validate
from megaasync.entry.spawn import RankFailed, spawn_ranks
from megaasync.kernels.choose import choose_kernels
from megaasync.kernels.te_contract import NEEDED, ROUTER, TE, Features, features_of
from megaasync.nn.torch_kernels import TORCH_KERNELS
from tests.support.cli import tool
from tests.support.configs import small_config
from tests.support.runs import assert_same_run, put_together, run, run_rank
from tests.support.te_stand_in import Recorder, install, signatures
from tests.support.tiers import slow_params
from tools.bench.te_signatures import RELEASES, signature_of

REPOSITORY = Path(__file__).parents[2]
ADAPTER = REPOSITORY / "megaasync" / "kernels" / "transformer_engine.py"
HOLDERS = {"self._te": TE, "self._te.router": ROUTER}
OPTIONAL = {"topk_indices", "overwrite_input"}  # passed where a release has them: `te_contract.Features`


def wrong_keywords(source):
    """Keywords that the adapter gives to a name of Transformer Engine and the contract does not list; unknown names."""
    found, seen = [], set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        module = HOLDERS.get(ast.unparse(node.func.value))
        if module is None:
            continue
        name = node.func.attr
        if (module, name, "") not in NEEDED:
            found.append(f"{module} has no {name}")
            continue
        seen.add((module, name, ""))
        if name != "checkpoint":
            assert not node.args, f"{name}: by keyword only, so that a new order cannot hurt"
            given = {keyword.arg for keyword in node.keywords} - {None}
            found += [f"{name}({keyword}=)" for keyword in given - set(NEEDED[module, name, ""]) - OPTIONAL]
    return found, seen


def test_the_contract_lists_what_the_adapter_passes():
    """Every keyword is listed, everything listed is passed, and methods are what the stand-in sees called."""
    source = ADAPTER.read_text()
    found, seen = wrong_keywords(source)
    assert found == []
    assert seen == {key for key in NEEDED if not key[2]}
    words = {word for passed in NEEDED.values() for word in passed} - {"inp"}
    assert [word for word in sorted(words) if f"{word}=" not in source] == []


FEATURES = {
    "2.14.0": Features(splits_on_host=True, topk_indices=False, overwrite_input=False),
    "2.19.0": Features(),
    "2.20.2": Features(),
}


@pytest.mark.parametrize("release", RELEASES)
def test_what_each_release_has_is_read_from_its_signatures(release):
    assert features_of(partial(signature_of, signatures(release))) == FEATURES[release]


UNUSABLE = [
    ({f"{TE} moe_permute": None}, "it has no moe_permute"),
    (
        {f"{TE} GroupedLinear": "num_gemms, in_features, out_features, bias"},
        "its GroupedLinear takes no fuse_wgrad_acc",
    ),
    ({f"{TE} GroupedLinear forward": "inp, splits"}, "its GroupedLinear.forward takes no m_splits"),
    ({f"{TE} Fp8Padding": "num_gemms, align_size"}, "its Fp8Padding also wants align_size"),
]


@pytest.mark.parametrize(("changes", "message"), UNUSABLE, ids=[words for _, words in UNUSABLE])
def test_a_release_that_cannot_be_used_is_named_by_what_it_lacks(changes, message):
    """Each one with `auto` is a line and torch's kernels, with `te` a refusal, before any layer is made."""
    changed = {key: takes for key, takes in {**signatures("2.20.2"), **changes}.items() if takes is not None}
    with pytest.raises(ImportError, match=message):
        features_of(partial(signature_of, changed))


def test_auto_goes_on_with_torch_where_the_release_cannot_be_used(monkeypatch):
    install_here(Recorder(), monkeypatch)
    monkeypatch.delattr(sys.modules[TE], "moe_permute")
    said: list[str] = []
    how = {"reference": TORCH_KERNELS, "splits_backward": False, "notify": said.append}
    config, device = small_config(train__dtype="bfloat16"), torch.device("cuda")
    with pytest.raises(ConfigError, match="kernels=te: Transformer Engine is of a release .*it has no moe_permute"):
        choose_kernels(replace(config, kernels="te"), device=device, **how)
    assert choose_kernels(replace(config, kernels="auto"), device=device, **how) is TORCH_KERNELS
    (line,) = said
    assert "it has no moe_permute); 2.14 to 2.20 can; going on with kernels=torch" in line


@pytest.mark.parametrize(
    "word", ["fuse_wgrad_accumulation", "num_gqa_groups", "m_splits", "merging_probs", "expert_bias"]
)
def test_a_misspelt_keyword_is_noticed(word, monkeypatch):
    """By the check, or, for the call of a module, by the stand-in."""
    misspelt = ADAPTER.read_text().replace(f"{word}=", f"{word[:-1]}=")
    assert misspelt != ADAPTER.read_text()
    if word == "m_splits":
        scope = {}
        exec(compile(misspelt, str(ADAPTER), "exec"), scope)
        recorder = Recorder()
        install_here(recorder, monkeypatch)
        kernels = scope["TransformerEngineKernels"](sys.modules[TE], **HOW)
        weight = torch.nn.Parameter(torch.randn(2, 8, 8))
        with pytest.raises(TypeError, match="m_split"):
            kernels.expert_linear(2, 8, 8)(torch.randn(4, 8), weight, torch.tensor([3, 1]))
    else:
        assert len(wrong_keywords(misspelt)[0]) > 0


HOW = {"reference": TORCH_KERNELS, "dtype": torch.float32, "device": torch.device("cpu"), "splits_backward": False,
       "fp8": "none", "features": Features()}  # fmt: skip


def install_here(recorder, monkeypatch):
    for name in ("transformer_engine", "transformer_engine.common", TE, f"{TE}.router",
                 "transformer_engine.common.recipe"):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    install(recorder)


@pytest.mark.parametrize("release", slow_params(RELEASES, kept=(2,), area="engine"))
def test_the_signatures_are_those_of_the_release(tmp_path, release):
    """Downloaded and read again; skipped where there is no package index."""
    done = tool("tools.bench.te_signatures", f"release={release}", "out=read.json", cwd=tmp_path)
    if "cannot be downloaded" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0 and "can be used" in done.stdout, done.stderr
    assert json.loads((tmp_path / "read.json").read_text()) == signatures(release)


def te_rank(environment, config, release):
    """A run with the stand-in; on every rank its numbers and what was called."""
    recorder = Recorder(release)
    install(recorder)
    return run_rank(environment, config), [(name, method) for name, method, _ in recorder.calls]


def run_te(config, release=RELEASES[-1]):
    parts = spawn_ranks(te_rank, (replace(config, kernels="te"), release), world_size=config.world_size)
    numbers = parts[0][0]
    numbers.weights = put_together([part[0] for part in parts], config)
    return numbers, {call for part in parts for call in part[1]}


CASES = {
    "two stages, experts": {"parallel__pipeline": 2},
    "sigmoid with a bias": {"model__moe__score_function": "sigmoid", "model__moe__bias_update_rate": 0.01},
    "softmax before": {"model__moe__normalize_top_k": False},
    "sequence parallel": {"parallel__tensor": 2, "parallel__sequence_parallel": True, "model__qk_norm": True},
    "tensor": {"parallel__tensor": 2, "model__tie_embeddings": True},
    "odd vocabulary": {"parallel__tensor": 2, "model__vocab_size": 65},
    "expert": {"parallel__expert": 2},
    "split sequence parallel": {
        "parallel__tensor": 2,
        "parallel__sequence_parallel": True,
        "parallel__pipeline": 2,
        "schedule__name": "zb_h1",
    },
    "capacity": {"model__moe__capacity_factor": 1.0},
    "split backward": {"parallel__pipeline": 2, "schedule__name": "zb_h1"},
    "selective": {"train__recompute": "selective", "parallel__pipeline": 2},
    "full": {"train__recompute": "full", "parallel__pipeline": 2},
    "padded": {},
}


KEPT = ("two stages, experts", "sequence parallel", "odd vocabulary", "split backward", "capacity", "padded")


@pytest.mark.parametrize(
    "case", [case if case in KEPT else pytest.param(case, marks=pytest.mark.slow("engine")) for case in CASES]
)
def test_the_adapter_gives_the_reference_s_numbers(case):
    """Losses, norms and weights of the engine, to 1e-9 in float64: forward, backward, both with versions."""
    config = small_config(train__steps=4, **CASES[case])
    fp8 = replace(config.train, fp8="current" if case == "padded" else "none")
    ours, calls = run_te(replace(config, train=fp8))
    assert_same_run(run(config), ours, tolerance=1e-9)
    expected = {("Linear", "forward"), ("RMSNorm", "__init__"), ("DotProductAttention", "forward"),
                ("GroupedLinear", "forward")}  # fmt: skip
    assert (("parallel_cross_entropy", "") in calls) == (case != "odd vocabulary")
    if case != "capacity":
        expected |= {("moe_permute", ""), ("moe_unpermute", "")}
    expected |= {("fused_topk_with_score_function", "")}
    if case.startswith("split"):
        expected |= {("Linear", "backward_dw"), ("GroupedLinear", "backward_dw")}
    if case == "full":
        expected |= {("checkpoint", "")}
    if case == "padded":
        expected |= {("autocast", "__init__"), ("Fp8Padding", "forward"), ("Fp8Unpadding", "forward")}
    assert expected <= calls, expected - calls


@pytest.mark.parametrize("fp8", ["none", "current"])
def test_an_older_release_gives_the_reference_s_numbers(fp8):
    """2.14: rows by lists, torch's router, a cross entropy that is told nothing of its memory."""
    config = small_config(train__steps=4)
    ours, calls = run_te(replace(config, train=replace(config.train, fp8=fp8)), "2.14.0")
    assert_same_run(run(config), ours, tolerance=1e-9)
    assert {("GroupedLinear", "forward"), ("parallel_cross_entropy", ""), ("moe_permute", "")} <= calls
    assert ("fused_topk_with_score_function", "") not in calls


def mixed_rank(environment, config):
    """Transformer Engine works on rank 0 only."""
    install(Recorder())
    return run_rank(environment, replace(config, kernels="te" if environment.rank == 0 else "torch"))


def test_ranks_that_find_different_things_are_refused():
    with pytest.raises(RankFailed, match="works on 1 of 2 ranks only; look at its install .*set kernels=torch"):
        spawn_ranks(mixed_rank, (small_config(parallel__tensor=2),), world_size=2)


def test_every_version_has_modules_of_its_own(monkeypatch):
    """Two weight versions never share a quantised weight: their modules are copies, on their own parameters."""
    install_here(Recorder(), monkeypatch)
    adapter = importlib.import_module("megaasync.kernels.transformer_engine")
    one = adapter.TransformerEngineKernels(sys.modules[TE], **HOW).expert_linear(2, 8, 8)
    two = copy.deepcopy(one)
    assert one._hidden[0] is not two._hidden[0]
    for version in (one, two):
        weight = torch.nn.Parameter(torch.randn(2, 8, 8))
        version(torch.randn(4, 8), weight, torch.tensor([3, 1]))
        assert version._hidden[0].weight1.data_ptr() == weight[1].data_ptr()
    assert one._hidden[0].weight1.data_ptr() != two._hidden[0].weight1.data_ptr()
    assert list(one.parameters()) == []  # the only parameter is the experts'


class Broken:
    """A finder that makes an import of Transformer Engine fail as broken installs do."""

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name.startswith("transformer_engine"):
            raise self.error


ERRORS = [
    RuntimeError("Found empty transformer-engine meta package installed."),
    RuntimeError("cudnn shared object not found."),
    FileNotFoundError("Could not find shared object file for Transformer Engine torch lib."),
    OSError("libcudart.so.13: cannot open shared object file"),
    ImportError("undefined symbol: _ZN3c10"),
]


@pytest.fixture
def no_engine(monkeypatch):
    for name in [module for module in sys.modules if module.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_broken_install_is_one_clear_message(error, monkeypatch, no_engine):
    monkeypatch.setattr(sys, "meta_path", [Broken(error), *sys.meta_path])
    said, how = [], {"reference": TORCH_KERNELS, "splits_backward": False}
    config, device = small_config(train__dtype="bfloat16"), torch.device("cuda")
    with pytest.raises(ConfigError, match="kernels=te: Transformer Engine is installed, but .*set kernels=torch"):
        choose_kernels(replace(config, kernels="te"), device=device, notify=said.append, **how)
    assert choose_kernels(replace(config, kernels="auto"), device=device, notify=said.append, **how) is TORCH_KERNELS
    (line,) = said
    assert str(error) in line and "going on with kernels=torch" in line


def test_where_it_is_not_installed(monkeypatch, no_engine):
    monkeypatch.setattr(sys, "meta_path", [item for item in sys.meta_path if not isinstance(item, Broken)])
    said, how = [], {"reference": TORCH_KERNELS, "splits_backward": False}
    config = small_config(train__dtype="bfloat16")
    with pytest.raises(ConfigError, match="kernels=te: Transformer Engine is not installed; .*set kernels=torch"):
        choose_kernels(replace(config, kernels="te"), device=torch.device("cpu"), notify=said.append, **how)
    for device in ("cpu", "cuda"):
        found = choose_kernels(replace(config, kernels="auto"), device=torch.device(device), notify=said.append, **how)
        assert found is TORCH_KERNELS
    assert said == []


FP8 = {"kernels": "te", "device": "auto", "train__dtype": "bfloat16", "train__fp8": "current", "model__hidden_size": 64,
       "model__num_heads": 4, "model__num_kv_heads": 2, "model__ffn_hidden_size": 96, "model__moe__ffn_hidden_size": 48,
       "model__moe__num_shared_experts": 1, "model__seq_length": 8, "train__micro_batch_size": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, None),
        ({"model__ffn_hidden_size": 40, "model__moe__first_dense_layers": 0}, None),
        ({"model__ffn_hidden_size": 40}, "model.ffn_hidden_size / parallel.tensor is 40"),
        ({"parallel__tensor": 2, "model__hidden_size": 48}, "model.hidden_size / parallel.tensor is 24"),
        ({"model__num_heads": 8, "model__num_kv_heads": 1}, "head size x model.num_kv_heads / parallel.tensor is 8"),
        ({"model__moe__ffn_hidden_size": 40}, "model.moe.ffn_hidden_size is 40"),
        ({"parallel__tensor": 2, "model__num_kv_heads": 4}, "num_shared_experts / parallel.tensor is 24"),
        ({"train__micro_batch_size": 1}, "train.micro_batch_size x model.seq_length is 8"),
    ],
)
def test_sizes_that_fp8_cannot_have_are_named(overrides, message):
    if message is None:
        assert small_config(**FP8 | overrides).train.fp8 == "current"
        return
    with pytest.raises(ConfigError, match=message):
        small_config(**FP8 | overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kernels": "te", "train__dtype": "float64", "device": "auto"}, "no float64; set train.dtype=bfloat16"),
        ({"kernels": "te", "train__dtype": "bfloat16"}, "needs a GPU, but device=cpu; set kernels=torch"),
        ({"train__fp8": "current"}, "train.fp8=current: .*set kernels=te train.dtype=bfloat16, or train.fp8=none"),
        (
            {"kernels": "te", "device": "auto", "train__dtype": "bfloat16", "train__fp8": "mxfp8"},
            "multiples of 32 wide on each rank, but model.hidden_size is 16; change",
        ),
    ],
)
def test_wrong_choices_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(small_config(**overrides))
