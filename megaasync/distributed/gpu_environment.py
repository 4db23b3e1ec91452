"""The environment variables that decide whether a run on GPUs hangs, repeats or fragments: what it sets and refuses.

They are read when CUDA starts or a communicator is made, so all is done before. Values of the user's that would hang a
pipeline are replaced, and each replacement is told.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass

from megaasync.config import ConfigError

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_ENOUGH_QUEUES = 8
_BINDING = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU")  # a GPU per task


@dataclass(frozen=True, slots=True)
class GpuNeeds:
    """What of a config the variables follow.

    Attributes:
        num_stages: of the pipeline.
        p2p_channels: most NCCL channels for messages between two ranks; None leaves that to NCCL.
        deterministic: runs repeat bit for bit.
    """

    num_stages: int = 1
    p2p_channels: int | None = None
    deterministic: bool = False


def _defaults(needs: GpuNeeds) -> dict[str, str]:
    """Set where nobody has set them."""
    found = {
        _QUEUES: "32",  # streams that share a hardware queue wait for each other, in another order on another rank
        "CUDA_MODULE_LOADING": "EAGER",  # a kernel loaded at its first use waits until nothing runs on the device
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # messages of several sizes come and go: less is lost
    }
    if needs.p2p_channels is not None:
        found["NCCL_MAX_P2P_NCHANNELS"] = str(needs.p2p_channels)
    if needs.deterministic:
        found |= {
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "NCCL_ALGO": "Ring",  # sums in the order of the ring, whatever the size of a message
        }
    return found


def prepare_gpu(variables: MutableMapping[str, str], needs: GpuNeeds, *, has_started: bool) -> list[str]:
    """Set what is missing and replace what would hang.

    Args:
        variables: the environment of this process.
        needs: of the run.
        has_started: CUDA runs already, and has read them.

    Returns:
        A line for each value of the user's that was replaced, and one with all that was set.

    Raises:
        ConfigError: a value that would hang the run and cannot be replaced; names it and the remedy.
    """
    lines = []
    if needs.num_stages > 1 and variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ConfigError(
            f"CUDA_LAUNCH_BLOCKING={variables['CUDA_LAUNCH_BLOCKING']}: every launch would wait for the one before, "
            f"and a pipeline of {needs.num_stages} stages for messages that are never sent; unset it, or set "
            "parallel.pipeline=1 to look for a fault"
        )
    wanted = _defaults(needs)
    queues = variables.get(_QUEUES, wanted[_QUEUES])
    if not queues.isdecimal() or int(queues) < 1:
        raise ConfigError(f"{_QUEUES}={queues}: must be a whole number of at least 1; unset it")
    replaced = {}
    if int(queues) < _ENOUGH_QUEUES:
        if has_started:
            raise ConfigError(
                f"{_QUEUES}={queues}: communication beside computation needs {_ENOUGH_QUEUES} hardware queues or more, "
                "and CUDA has started already; unset it before Python starts"
            )
        replaced[_QUEUES] = "streams that share a hardware queue would wait for each other"
    if variables.get("CUDA_MODULE_LOADING", "EAGER").upper() != "EAGER":
        replaced["CUDA_MODULE_LOADING"] = "a kernel loaded at its first use waits until nothing runs on the device"
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if variables.get(name, "0") not in ("", "0"):
            wanted[name], replaced[name] = "0", "the host would wait for every message"
    for name, why in replaced.items():
        lines.append(f"{name}={variables[name]} in the environment is {wanted[name]} for this run: {why}")
        variables[name] = wanted[name]
    if needs.p2p_channels is not None and "NCCL_MAX_P2P_NCHANNELS" in variables:
        variables["NCCL_MAX_P2P_NCHANNELS"] = wanted["NCCL_MAX_P2P_NCHANNELS"]  # the config is the nearer one
    if "PYTORCH_ALLOC_CONF" in variables:  # its newer name
        del wanted["PYTORCH_CUDA_ALLOC_CONF"]
    if has_started:
        return lines
    new = {name: value for name, value in wanted.items() if name not in variables}
    variables.update(new)
    if new:
        lines.append("environment for the GPU: " + " ".join(f"{name}={value}" for name, value in sorted(new.items())))
    return lines


def own_gpu(variables: MutableMapping[str, str], *, local_rank: int, local_world_size: int, num_visible: int) -> int:
    """Which of the GPUs that a rank sees is its own.

    A launcher that binds a GPU to each task (`--gpus-per-task=1`, `--gpu-bind=single:1`) lets a rank see one only.

    Raises:
        ConfigError: there are fewer than ranks on this host; names the variable that hides them.
    """
    if local_rank < num_visible and (num_visible > 1 or local_world_size == 1):
        return local_rank
    is_bound = any(name in variables for name in _BINDING)
    if num_visible == 1 and is_bound and "SLURM_STEP_NUM_TASKS" in variables:
        return 0
    hidden = [
        f"{name}={variables[name]}"
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
        if variables.get(name) not in (None, "all")
    ]
    if local_rank < num_visible:  # the first of several ranks, on a host that shows one GPU: the others will say it
        return local_rank
    because = f" because of {' and '.join(hidden)}" if hidden else ""
    raise ConfigError(
        f"local rank {local_rank} of {local_world_size} has no GPU of its own: torch sees {num_visible}{because}; "
        "start at most one rank per GPU, unset the variable, or bind one to each task with --gpus-per-task=1 under srun"
    )
