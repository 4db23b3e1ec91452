"""The stages of one rank: modules, initial weights, versions, optimizer, and the backend that computes them."""

from collections.abc import Callable

import torch
from torch import Tensor

from megaasync.config.schema import Config, ConfigError, Taylor
from megaasync.distributed.mesh import Mesh
from megaasync.distributed.rank_group import RankGroup
from megaasync.kernels.backend import Kernels
from megaasync.kernels.choose import choose_kernels
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import DecoderStage, ModelParallelGroups
from megaasync.nn.layer_context import LayerContext
from megaasync.nn.precision import at_least_float32, default_dtype
from megaasync.nn.recompute import Recompute
from megaasync.nn.tensor_parallel import TensorParallel
from megaasync.nn.torch_kernels import TORCH_KERNELS
from megaasync.optim.delay_compensation import DelayCompensation
from megaasync.optim.lr_schedule import LearningRate, LrShape
from megaasync.optim.sharded_reducer import ShardedReducer
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.shared_parts import StagePlace, make_shared_parts
from megaasync.pipeline.stage_compute import StageCompute
from megaasync.pipeline.stage_update import StageUpdate
from megaasync.plan.sizes import DTYPES, REPLICAS, StageBuffers, StageSizes
from megaasync.schedules import PipelineSchedule
from megaasync.train.groups import Groups
from megaasync.train.kernel_check import difference_of


def _initial_weights(module: DecoderStage, config: Config, sizes: StageSizes, *, rank: int) -> list[Tensor]:
    """Draw a module's parameters; also returned in at least float32, for masters that no rounding has touched."""
    exact = at_least_float32(DTYPES[config.train.dtype])
    weights = {name: parameter.detach().to(exact) for name, parameter in module.named_parameters()}
    initialize_(weights, config.model, seed=config.train.seed, shapes=sizes.shapes, parts=sizes.parts(rank=rank))
    with torch.no_grad():
        for parameter, weight in zip(module.parameters(), weights.values(), strict=True):
            parameter.copy_(weight)
    return list(weights.values())


def learning_rate_of(config: Config) -> LearningRate:
    """The learning rate that a config asks for."""
    return LearningRate(LrShape.of(config.train), peak=config.optimizer.lr)


def build_stage(
    config: Config,
    schedule: PipelineSchedule,
    needs: StageBuffers,
    *,
    index: int,
    mesh: Mesh,
    groups: Groups,
    device: torch.device,
    learning_rate: LearningRate | None = None,
    kernels: Kernels = TORCH_KERNELS,
) -> tuple[StageCompute, StageUpdate]:
    """The two halves of one stage, with its weights, versions, gradient sums and optimizer."""
    sizes = StageSizes(config, schedule, index=index)
    dtype, layout = DTYPES[config.train.dtype], sizes.flat_layout(rank=mesh.rank)
    splits = ModelParallelGroups(TensorParallel(groups.tensor, config.parallel.sequence_parallel), groups.expert)
    recompute = Recompute(config.train.recompute, kernels.checkpoint)
    context = LayerContext(kernels, recompute, config.train.loss_chunk_tokens)
    with default_dtype(dtype), device:
        module = DecoderStage(config.model, sizes.layers, splits, context)
    initial = _initial_weights(module, config, sizes, rank=mesh.rank)
    optimizer = StageOptimizer(
        layout,
        initial,
        dtype=at_least_float32(dtype),
        learning_rate=learning_rate or learning_rate_of(config),
        tensor=groups.tensor_updates,
        compensation=DelayCompensation(config.correction.strength, config.correction.adaptive)
        if isinstance(config.correction, Taylor)
        else None,
    )
    shared = make_shared_parts(
        module,
        layout,
        num_versions=needs.versions[index],
        num_gradient_buffers=needs.gradient_buffers[index],
        gradient_dtype=optimizer.master.dtype,
        bias_update_rate=config.model.moe.bias_update_rate if config.model.moe else 0.0,
    )
    place = StagePlace(index, schedule.num_stages)
    compute = StageCompute(
        place,
        shared,
        splits_backward=schedule.splits_backward,
        needs_documents=config.train.document_mask,
        reports_loss=mesh.coordinate("tensor") == 0,
    )
    update = StageUpdate(
        place,
        shared,
        optimizer,
        data_parallel=ShardedReducer(layout, groups.updates),
        replicas=groups.updates[mesh.dims.effective(REPLICAS)],
        tied=None if sizes.tied is None else layout.bucket_of(sizes.tied),
    )
    return compute, update


def _checked(kernels: Kernels, config: Config, *, device: torch.device, notify: Callable[[str], None]) -> Kernels:
    """The backend that `auto` has found, if two layers of it compute what torch's do; else torch's.

    No GPU has run the adapter's tests yet: what nobody has asked for must first show that it is right here.
    """
    try:
        fault = difference_of(
            kernels,
            TORCH_KERNELS,
            config.model,
            dtype=DTYPES[config.train.dtype],
            device=device,
            is_fp8=config.train.fp8 != "none",
        )
    except Exception as error:  # of a library that has never been tried here: of any kind
        fault = f"it ends with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if fault is None:
        return kernels
    notify(f"kernels={kernels.name} does not pass its check on two layers: {fault}; going on with kernels=torch")
    return TORCH_KERNELS


def agreed_kernels(
    config: Config, group: RankGroup, *, device: torch.device, splits_backward: bool, notify: Callable[[str], None]
) -> Kernels:
    """The backend, the same on all ranks: inside a layer that they share, two would not meet.

    Raises:
        ConfigError: on every rank.
    """
    fault: ConfigError | None = None
    kernels: Kernels = TORCH_KERNELS
    try:
        kernels = choose_kernels(
            config, reference=TORCH_KERNELS, device=device, splits_backward=splits_backward, notify=notify
        )
    except ConfigError as error:  # the others must hear of it before they wait for this rank
        fault = error
    if config.kernels == "auto" and kernels is not TORCH_KERNELS:
        kernels = _checked(kernels, config, device=device, notify=notify)
    without = torch.full((), float(kernels is TORCH_KERNELS), device=device)
    group.all_reduce(without)
    count = int(without.item())
    if fault is not None:
        raise fault
    if count not in (0, group.size):
        raise ConfigError(
            f"kernels={config.kernels}: Transformer Engine works on {group.size - count} of {group.size} ranks only; "
            "look at its install on the others, or set kernels=torch"
        )
    return kernels
