"""The plan against counts made another way: parameters, activations on fake tensors, operations, warnings, time."""

import json
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megaasync.data.microbatches import Microbatch
from megaasync.entry.spawn import spawn_ranks
from megaasync.models.flops import flops_per_token
from megaasync.models.transformer import DecoderStage
from megaasync.plan.plan import make_plan
from megaasync.plan.text import render_plan, summarise_plan
from tests.entry.test_text_values import SLURM
from tests.support.cli import environment, pretrain, tool
from tests.support.configs import BALANCED, small_config
from tests.support.tiers import slow_params

PAPER = ("dry_run=true", "experiment=paper_10b_moe", "cluster=slurm", "cluster.nodes=8")

# Whatever a plan's limit counts, this prints the largest resident size of the command after it.
PEAK = """import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("peak", used.ru_maxrss, used.ru_utime + used.ru_stime)
sys.exit(code)"""


def test_the_10b_plan_on_a_laptop(tmp_path):
    """Under 30 s of one core and 4 GiB; parameters counted here from the shape's own numbers."""
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, sys.executable, "-m", "megaasync.pretrain", *PAPER, f"run.dir={tmp_path}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    peak, seconds = map(float, ran.stdout.split()[-2:])
    assert peak < 4 * 2**20  # KiB
    assert seconds < 30  # of processor time, which a busy machine does not stretch
    plan = json.loads((tmp_path / "plan.json").read_text())
    hidden, layers, experts, width = 2048, 26, 64, 960
    attention = hidden * 128 * (2 * 16 + 2 * 4)
    moe = experts * 3 * hidden * width + 3 * hidden * width + experts * hidden
    dense = 3 * hidden * 6720
    norms = (2 * layers + 1) * hidden
    total = 2 * 49152 * hidden + layers * attention + (layers - 1) * moe + dense + norms
    assert plan["total_parameters"] == total
    assert 9.5e9 < total < 10.5e9
    assert plan["active_parameters"] == total - (layers - 1) * (experts - 6) * 3 * hidden * width
    assert 1.2e9 < plan["active_parameters"] < 2e9
    assert plan["world_size"] == 64
    assert plan["tokens"] == pytest.approx(200e9, rel=1e-4)
    assert "over 1f1b" in ran.stdout and "stage 0    from rank 0" not in ran.stdout
    assert not plan["warnings"]


@pytest.mark.parametrize("nodes", [32])
def test_the_same_on_more_nodes(tmp_path, nodes):
    ran = pretrain(*PAPER[:-1], f"cluster.nodes={nodes}", f"run.dir={tmp_path}", cwd=tmp_path)
    assert ran.status == 0, ran.err
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["world_size"] == 8 * nodes
    assert not plan["warnings"]
    assert all(stage["slack"] > 0 for stage in plan["stages"])


def test_wrong_layouts_for_a_cluster(tmp_path):
    for arguments, words in (
        ((*PAPER, "parallel.data=3"), ("cluster.nodes=8", "96 ranks", "parallel.data=auto")),
        ((*PAPER, "parallel.pipeline=7"), ("parallel.data=auto", "56 does not divide", "64 ranks")),
        (PAPER[1:], ("cluster=slurm", "dry_run=true")),
    ):
        ran = pretrain(*arguments, cwd=tmp_path)
        assert ran.status == 2
        for word in words:
            assert word in ran.message, (arguments, ran.message)
        assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def measuring_rank(environment, config, ranks):
    """(planned, measured) bytes of each rank, in a process of its own: fake tensors leave marks in torch."""
    from tools.bench.measure_plan import measure_rank, planned_rank

    return [(planned_rank(config, rank), measure_rank(config, rank)) for rank in ranks]


@pytest.mark.parametrize(
    "overrides",
    slow_params(
        [
            {},
            {"model__moe": None, "model__tie_embeddings": True},
            {"parallel__tensor": 2, "parallel__sequence_parallel": True},
            {"parallel__tensor": 2},
            {"parallel__expert": 2, "parallel__data": 2, **BALANCED},
            {"parallel__tensor": 2, "model__moe": None, "parallel__sequence_parallel": True},
            {"train__recompute": "selective"},
            {"train__recompute": "selective", "parallel__expert": 2, "parallel__tensor": 2},
            {"train__recompute": "selective", "model__moe": None},
            {"train__recompute": "full"},
            {"model__qk_norm": True, "parallel__tensor": 2, "parallel__sequence_parallel": True},
            {"model__qk_norm": True, "train__recompute": "selective"},
            {"train__document_mask": True, "data": {"name": "indexed", "path": "none", "validation_path": None}},
        ],
        kept=(1, 2, 4, 6, 9, 10, 12),
        area="layouts",
    ),
    ids=[
        "experts",
        "dense",
        "sequence parallel",
        "tensor",
        "expert",
        "dense sequence parallel",
        "selective",
        "selective expert",
        "selective dense",
        "full",
        "query and key norms",
        "selective query and key norms",
        "documents",
    ],
)
def test_memory_is_what_fake_tensors_hold(overrides):
    """Weights, gradients, masters and states exactly or nearly; activations within a twentieth."""
    experts = {} if "model__moe" in overrides else {"model__moe__ffn_hidden_size": 64}
    config = small_config(
        train__dtype="bfloat16",
        parallel__pipeline=2,
        model__hidden_size=64,
        model__ffn_hidden_size=192,
        model__seq_length=32,
        model__vocab_size=512,
        train__global_batch_size=16,
        **experts,
        **overrides,
    )
    (measurements,) = spawn_ranks(measuring_rank, (config, (0, config.world_size - 1)), world_size=1)
    for planned, measured in measurements:
        for kind in ("weights", "gradients"):
            assert planned[kind] == measured[kind], kind
        for kind in ("master", "optimizer_state"):  # the plan's is of the rank that holds most
            assert measured[kind] <= planned[kind] <= 1.25 * measured[kind], kind
        assert planned["activations"] == pytest.approx(measured["activations"], rel=0.05)


@pytest.mark.parametrize("moe", [True, False])
def test_operations_are_those_of_the_products(moe):
    """torch's own counter on one forward and backward; it counts attention whole, we count the causal half."""
    config = small_config(**({} if moe else {"model__moe": None})).model
    torch.set_default_dtype(torch.float64)
    try:
        model = DecoderStage(config, range(config.num_layers))
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(config.vocab_size, (2, config.seq_length))
    # which torch's counter leaves out
    in_place = {torch.ops.aten.addmm_: lambda total, a, b, *_, out_shape: 2 * a[0] * a[1] * b[1]}
    with (
        FlopCounterMode(display=False, custom_mapping=in_place) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(None, Microbatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool))).backward()
    half_of_attention = 3 * config.num_layers * 2 * config.seq_length * config.hidden_size
    expected = counter.get_total_flops() / tokens.numel() - half_of_attention
    assert flops_per_token(config) == pytest.approx(expected, rel=1e-6)


def test_operations_do_not_depend_on_the_layout():
    plain = make_plan(small_config())
    for overrides in ({"parallel__tensor": 2}, {"parallel__expert": 2, "parallel__pipeline": 2}):
        plan = make_plan(small_config(**overrides))
        for name in ("flops_per_token", "total_parameters", "active_parameters", "tokens_per_step"):
            assert plan[name] == plain[name]


def test_a_tied_embedding_is_one_parameter():
    whole, split = (make_plan(small_config(model__tie_embeddings=True, parallel__pipeline=p)) for p in (1, 2))
    assert whole["total_parameters"] == split["total_parameters"]
    assert sum(stage["parameters"] for stage in split["stages"]) == whole["total_parameters"] + 64 * 16


def test_what_does_not_fit_or_hide_is_said():
    cluster = {"cluster__gpu_memory_gib": 1e-5, "cluster__gpu_tflops": 100.0, "cluster__network_gbytes": 1e-4}
    plan = make_plan(small_config(parallel__pipeline=2, parallel__data=2, **cluster))
    text = render_plan(plan)
    assert any("more than cluster.gpu_memory_gib=1e-05" in warning for warning in plan["warnings"])
    assert any("the pipeline will wait" in warning for warning in plan["warnings"])
    assert text.count("WARNING") == len(plan["warnings"]) == 4
    assert make_plan(small_config(parallel__pipeline=2))["warnings"] == []


@pytest.mark.parametrize(("share", "words"), [(1.01, "more than"), (0.95, "leaves less than 10% for"), (0.85, None)])
def test_a_tenth_of_the_memory_is_left_for_what_is_not_counted(share, words):
    largest = max(line["total_bytes"] for line in make_plan(small_config())["ranks"])
    cluster = {"cluster__gpu_memory_gib": largest / share / 2**30, "cluster__gpu_tflops": 100.0}
    warnings = make_plan(small_config(**cluster))["warnings"]
    assert (words is None and warnings == []) or (len(warnings) == 1 and words in warnings[0])


def test_a_screen_gets_ten_lines_of_a_hundred_letters(tmp_path):
    """Whatever the plan: many stages, many warnings; the report and plan.json have the rest."""
    cluster = {"cluster__gpu_memory_gib": 1e-5, "cluster__gpu_tflops": 100.0, "cluster__network_gbytes": 1e-4}
    many = {"schedule__name": "interleaved_2bw", "parallel__virtual_stages": 6, "model__num_layers": 12}
    for overrides in ({}, {"parallel__pipeline": 2, **cluster}, {"parallel__pipeline": 2, **many, **cluster}):
        plan = make_plan(small_config(**overrides))
        lines = summarise_plan(plan).splitlines()
        assert len(lines) <= 10 and max(map(len, lines)) <= 100, lines
        assert ("are in plan.json" in lines[-1]) == (len(plan["warnings"]) > 10 - 7)
        assert any("memory     per rank" in line for line in lines)


def test_a_delay_on_one_rank_is_said_and_a_cpu_job_has_no_gpu_figures():
    assert "late gradients; schedule=1f1b trains without" in summarise_plan(make_plan(small_config()))
    assert "late gradients" not in summarise_plan(make_plan(small_config(schedule__name="1f1b")))
    assert "late gradients" not in summarise_plan(make_plan(small_config(parallel__pipeline=2)))
    slurm = {**SLURM, "gpu_memory_gib": 1e-5, "gpu_tflops": 100.0, "network_gbytes": 1e-4, "tasks_per_node": 2}
    for changes in ({"gpus_per_node": None}, {"gpus_per_node": 2}):
        config = small_config(parallel__pipeline=2, cluster={**slurm, **changes})  # its device is cpu
        plan = make_plan(config)
        assert plan["warnings"] == [] and "times " not in summarise_plan(plan)
        assert not any(stage["seconds"] for stage in plan["stages"])
    plan = make_plan(small_config(parallel__pipeline=2, device="auto", cluster={**slurm, "gpus_per_node": 2}))
    assert plan["warnings"] and "times " in summarise_plan(plan)


@pytest.mark.slow("layouts")
def test_the_measuring_tool(tmp_path):
    ran = tool("tools.bench.measure_plan", *PAPER[1:], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "rank 63 of 64" in ran.stdout
    refused = tool("tools.bench.measure_plan", "model=tiny_moe", cwd=tmp_path)
    assert refused.returncode == 2
    assert "set train.dtype=bfloat16" in refused.stderr
