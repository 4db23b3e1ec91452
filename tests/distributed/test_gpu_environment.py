"""Environment variables and visible GPUs, as launchers and users set them; no GPU is needed to say what is right."""

import pytest
import torch
from torch import distributed as dist

from megaasync.config import ConfigError
from megaasync.distributed import DeviceError, groups
from megaasync.distributed.gpu_environment import GpuNeeds, own_gpu, prepare_gpu

SET = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER",
       "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # fmt: skip


def prepared(given, *, has_started=False, **needs):
    variables = dict(given)
    return prepare_gpu(variables, GpuNeeds(**{"num_stages": 4, **needs}), has_started=has_started), variables


def test_what_nobody_has_set_is_set_and_told():
    lines, variables = prepared({"HOME": "/x"})
    assert variables == {"HOME": "/x", **SET}
    (line,) = lines
    assert all(f"{name}={value}" in line for name, value in SET.items()) and "HOME" not in line


@pytest.mark.parametrize("queues", ["1", "7"])
def test_too_few_hardware_queues_are_replaced_before_cuda_starts_and_refused_after(queues):
    lines, variables = prepared({"CUDA_DEVICE_MAX_CONNECTIONS": queues})
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert f"CUDA_DEVICE_MAX_CONNECTIONS={queues} in the environment is 32 for this run: " in lines[0]
    with pytest.raises(ConfigError, match=f"MAX_CONNECTIONS={queues}: .*CUDA has started already; unset it before"):
        prepared({"CUDA_DEVICE_MAX_CONNECTIONS": queues}, has_started=True)


def test_enough_hardware_queues_stay():
    lines, variables = prepared({**SET, "CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    assert lines == [] and variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert prepared({**SET, "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, has_started=True)[0] == []


@pytest.mark.parametrize("queues", ["many", "0", "-1", ""])
def test_a_number_of_queues_that_is_none(queues):
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=.*whole number of at least 1; unset it"):
        prepared({"CUDA_DEVICE_MAX_CONNECTIONS": queues})


def test_blocking_launches_are_refused_in_a_pipeline_only():
    with pytest.raises(ConfigError, match="CUDA_LAUNCH_BLOCKING=1: .*4 stages.*unset it, or set parallel.pipeline=1"):
        prepared({"CUDA_LAUNCH_BLOCKING": "1"})
    assert prepared({"CUDA_LAUNCH_BLOCKING": "1"}, num_stages=1)[1]["CUDA_LAUNCH_BLOCKING"] == "1"
    prepared({"CUDA_LAUNCH_BLOCKING": "0"})


@pytest.mark.parametrize(
    ("name", "given", "then"),
    [
        ("CUDA_MODULE_LOADING", "LAZY", "EAGER"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "0"),
        ("NCCL_BLOCKING_WAIT", "1", "0"),
    ],
)
def test_what_makes_the_host_wait_is_replaced(name, given, then):
    lines, variables = prepared({**SET, name: given})
    assert variables[name] == then and lines[0].startswith(
        f"{name}={given} in the environment is {then} for this run: "
    )
    assert prepared({**SET, name: then})[0] == []


def test_the_users_allocator_settings_stay_under_both_names():
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        variables = prepared({name: "max_split_size_mb:512"})[1]
        assert variables[name] == "max_split_size_mb:512"
        assert "expandable_segments:True" not in variables.values()


def test_the_cap_of_channels_and_determinism_follow_the_config():
    assert prepared({"NCCL_MAX_P2P_NCHANNELS": "8"}, p2p_channels=2)[1]["NCCL_MAX_P2P_NCHANNELS"] == "2"
    assert prepared({}, p2p_channels=2)[1]["NCCL_MAX_P2P_NCHANNELS"] == "2"
    assert "NCCL_MAX_P2P_NCHANNELS" not in prepared({})[1]
    variables = prepared({"NCCL_ALGO": "Tree"}, deterministic=True)[1]
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and variables["NCCL_ALGO"] == "Tree"
    assert variables["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"


SRUN = {"SLURM_STEP_NUM_TASKS": "16"}
PLACES = [  # variables, local rank, ranks of the host, GPUs that torch sees, number of its own
    ({}, 0, 1, 1, 0),
    ({}, 5, 8, 8, 5),
    ({}, 0, 1, 8, 0),
    ({**SRUN, "SLURM_GPUS_PER_TASK": "1"}, 3, 4, 1, 0),
    ({**SRUN, "SLURM_GPU_BIND": "single:1", "CUDA_VISIBLE_DEVICES": "0"}, 3, 4, 1, 0),
    ({**SRUN, "SLURM_NTASKS_PER_GPU": "1"}, 0, 4, 1, 0),
    ({**SRUN, "SLURM_GPUS_PER_TASK": "1"}, 3, 4, 4, 3),  # asked for, and not bound: all see all
]


@pytest.mark.parametrize(("variables", "rank", "ranks", "visible", "number"), PLACES)
def test_a_rank_finds_its_own_gpu(variables, rank, ranks, visible, number):
    assert own_gpu(variables, local_rank=rank, local_world_size=ranks, num_visible=visible) == number


@pytest.mark.parametrize(
    ("variables", "visible", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1, "torch sees 1 because of CUDA_VISIBLE_DEVICES=0; start at most one rank"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": "all"}, 2, "sees 2 because of CUDA_VISIBLE_DEVICES"),
        ({}, 2, "torch sees 2; start at most one rank per GPU"),
        (SRUN, 1, "local rank 3 of 4 has no GPU of its own: torch sees 1; .*--gpus-per-task=1 under srun"),
    ],
)
def test_more_ranks_than_gpus_says_what_hides_them(variables, visible, words):
    with pytest.raises(ConfigError, match=words):
        own_gpu(variables, local_rank=3, local_world_size=4, num_visible=visible)


def test_the_device_of_a_rank(monkeypatch):
    """With a make-believe torch.cuda: the environment is prepared, lines are told, and the host is named."""
    variables = {**SRUN, "SLURM_GPUS_PER_TASK": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    monkeypatch.setattr(groups, "variables", lambda: variables)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = []
    device = groups.choose_device("auto", local_rank=2, local_world_size=4, needs=GpuNeeds(2), notify=said.append)
    assert device == torch.device("cuda", 0)
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and len(said) == 2
    del variables["SLURM_GPUS_PER_TASK"]
    with pytest.raises(DeviceError, match="device=cuda: .*, local rank 2 of 4 has no GPU of its own: torch sees 1"):
        groups.choose_device("cuda", local_rank=2, local_world_size=4)


def test_a_cpu_run_changes_nothing(monkeypatch):
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    monkeypatch.setattr(groups, "variables", lambda: variables)
    assert groups.choose_device("cpu", local_rank=3, local_world_size=4, needs=GpuNeeds(2)).type == "cpu"
    assert variables == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_two_ranks_with_one_gpu_are_told_apart_by_its_uuid():
    store = dist.HashStore()
    groups._claim_gpu(store, "GPU-1", rank=0)
    groups._claim_gpu(store, "GPU-2", rank=1)
    with pytest.raises(DeviceError, match=r"rank 2 of .* has the GPU of another rank \(GPU-1\); start at most"):
        groups._claim_gpu(store, "GPU-1", rank=2)
