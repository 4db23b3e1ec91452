"""From a config to a trainer: the only place that knows all rooms."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from megaasync.checkpoint.keeper import CheckpointKeeper
from megaasync.checkpoint.stage_state import StageState
from megaasync.config.layout import AXES
from megaasync.config.pipeline import phases_of
from megaasync.config.schema import Config, ConfigError, IndexedData, SyntheticData, Taylor
from megaasync.data.identity import Identity
from megaasync.data.indexed_dataset import IndexedDataset
from megaasync.data.microbatches import DataShare, TokenSequences, TrainingMicrobatches, ValidationMicrobatches
from megaasync.data.prepare import PreparedData
from megaasync.data.synthetic import MarkovSource
from megaasync.distributed.action_board import ActionNotes
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.mesh import Mesh
from megaasync.distributed.p2p import TensorSpec
from megaasync.distributed.rank_group import RankGroup
from megaasync.kernels.backend import Kernels
from megaasync.kernels.choose import choose_kernels
from megaasync.models.initialize import initialize_
from megaasync.models.parameters import REDUCTIONS, layer_number, parameter_spec
from megaasync.models.transformer import DecoderStage, Splits
from megaasync.nn.computation import Computation
from megaasync.nn.precision import at_least_float32
from megaasync.nn.recompute import Recompute
from megaasync.nn.tensor_parallel import TensorParallel
from megaasync.nn.torch_kernels import TORCH_KERNELS
from megaasync.observe.trace import Recorder
from megaasync.optim.data_parallel import DataParallel
from megaasync.optim.delay_compensation import DelayCompensation
from megaasync.optim.lr_schedule import LearningRate, LrShape
from megaasync.optim.routing import Role
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.channels import Channels, Transport, group_names
from megaasync.pipeline.executor import Executor
from megaasync.pipeline.stage import PipelineStage
from megaasync.pipeline.updates import Updates
from megaasync.schedules import PipelineSchedule, check
from megaasync.train.checkpointing import RunCheckpoints
from megaasync.train.sizes import DTYPES, REPLICAS, StageNeeds, StageSizes, needs_of
from megaasync.train.trainer import Observer, Trainer


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a run trains on and is validated on."""

    train: TokenSequences
    validation: TokenSequences | None


def load_tokens(config: Config, prepared: PreparedData) -> Tokens:
    """Cut the tokens into sequences."""

    def cut(tokens: np.ndarray, name: str, document_ends: np.ndarray | None = None) -> TokenSequences:
        return TokenSequences(
            tokens,
            seq_length=config.model.seq_length,
            vocab_size=config.model.vocab_size,
            name=name,
            document_ends=document_ends if config.train.document_mask else None,
        )

    if isinstance(config.data, SyntheticData):
        chain = MarkovSource(
            vocab_size=config.model.vocab_size, branching=config.data.branching, seed=config.train.seed
        )
        held_out = max(config.data.num_tokens // 10, config.model.seq_length + 1)
        return Tokens(
            cut(chain.tokens(num_tokens=config.data.num_tokens, stream=0), "synthetic data"),
            cut(chain.tokens(num_tokens=held_out, stream=1), "synthetic validation data"),
        )
    source = IndexedDataset(prepared.train)
    train = cut(source.tokens, prepared.train, source.document_ends)
    if prepared.validation is None:
        return Tokens(train, None)
    validation = IndexedDataset(prepared.validation)
    is_split = not isinstance(config.data, IndexedData)  # a path given by the user is held to what it says
    too_short = is_split and len(validation.tokens) <= config.model.seq_length
    return Tokens(train, None if too_short else cut(validation.tokens, prepared.validation, validation.document_ends))


def training_source(
    config: Config, tokens: TokenSequences, *, share: DataShare, device: torch.device
) -> TrainingMicrobatches:
    """The microbatches that a rank trains on."""
    return TrainingMicrobatches(
        tokens,
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=config.num_microbatches,
        seed=config.train.seed,
        device=device,
        share=share,
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules made within have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_SAVE_TIMEOUT = timedelta(hours=1)  # of the ranks' agreement about a checkpoint, in the background


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Where checkpoints are.

    Attributes:
        root: folder of the run's own.
        resume: the one to go on from, or None.
        say: tells the user, on rank 0.
    """

    root: Path
    resume: Path | None
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one rank, one for each use: what runs in the background must not share one with what does not."""

    all: RankGroup
    norm: RankGroup
    ends: RankGroup | None
    tensor: RankGroup
    expert: RankGroup
    tensor_updates: RankGroup
    updates: dict[tuple[str, ...], RankGroup]
    messages: dict[str, dist.ProcessGroup | None]


def make_groups(mesh: Mesh, schedule: PipelineSchedule) -> Groups:
    """All ranks make the same kinds of groups in the same order."""
    messages = {name: mesh.new_group("pipeline").handle for name in group_names(schedule.rank_of_stage)}
    reductions = dict.fromkeys(mesh.layout.effective(axes) for axes in (*REDUCTIONS, REPLICAS))
    return Groups(
        all=mesh.new_group(*AXES),
        norm=mesh.new_group(*AXES),
        ends=mesh.new_group_of_ends() if schedule.is_tied else None,
        tensor=mesh.axis_group("tensor"),
        expert=mesh.axis_group("expert"),
        tensor_updates=mesh.new_group("tensor"),
        updates={axes: mesh.new_group(*axes) for axes in reductions},
        messages=messages,
    )


def connect_groups(groups: Groups, *, device: torch.device) -> None:
    """One small collective in each group, all ranks in one order.

    The first one in a group makes its connections, for which NCCL blocks the host: two threads that did so in two
    groups could wait for each other.
    """
    ends = [] if groups.ends is None else [groups.ends]
    for group in (
        groups.all,
        groups.norm,
        *ends,
        groups.tensor,
        groups.expert,
        groups.tensor_updates,
        *groups.updates.values(),
    ):
        group.all_reduce(torch.zeros(1, device=device))


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
    needs: StageNeeds,
    *,
    index: int,
    mesh: Mesh,
    groups: Groups,
    device: torch.device,
    learning_rate: LearningRate | None = None,
    kernels: Kernels = TORCH_KERNELS,
) -> PipelineStage:
    """One stage with its weights, versions, gradient sums and optimizer."""
    sizes = StageSizes(config, schedule, index=index)
    dtype, layout = DTYPES[config.train.dtype], sizes.flat_layout(rank=mesh.rank)
    splits = Splits(TensorParallel(groups.tensor, config.parallel.sequence_parallel), groups.expert)
    recompute = Recompute(config.train.recompute, kernels.checkpoint)
    computation = Computation(kernels, recompute, config.train.loss_chunk_tokens)
    with _default_dtype(dtype), device:
        module = DecoderStage(config.model, sizes.layers, splits, computation)
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
    return PipelineStage(
        module,
        layout,
        optimizer,
        index=index,
        num_stages=schedule.num_stages,
        num_versions=needs.versions[index],
        num_gradient_buffers=needs.gradient_buffers[index],
        splits_backward=schedule.splits_backward,
        tied_parameter=sizes.tied,
        data_parallel=DataParallel(layout, groups.updates),
        replicas=groups.updates[mesh.layout.effective(REPLICAS)],
        counts=mesh.coordinate("tensor") == 0,
        balance_rate=config.model.moe.bias_update_rate if config.model.moe else 0.0,
        needs_documents=config.train.document_mask,
    )


def build_trainer(
    config: Config,
    *,
    environment: RankEnvironment,
    prepared: PreparedData,
    device: torch.device,
    observer: Observer | None = None,
    files: CheckpointFiles | None = None,
    began: float | None = None,
) -> Trainer:
    """Everything one rank needs; the process group must be there if there are several ranks.

    Args:
        config: validated.
        environment: this rank's place.
        prepared: where the tokens are.
        device: this rank's device.
        observer: gets every row of metrics; rank 0 only.
        files: where checkpoints are, the same on all ranks; None for none.
        began: `perf_counter` when the run was started on this host; None for now.

    Raises:
        DataError: the tokens cannot be used.
        ConfigError: a checkpoint does not fit.
    """
    phases = phases_of(config)
    for phase in phases:
        check(phase.schedule)
    schedule = phases[0].schedule  # all phases have the same stages on the same ranks
    needs = needs_of(phases)
    tokens = load_tokens(config, prepared)
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    mesh = Mesh(config.layout, rank=environment.rank, device_type=device.type, timeout=timeout)
    groups = make_groups(mesh, schedule)
    connect_groups(groups, device=device)
    rank, counts = mesh.coordinate("pipeline"), mesh.coordinate("tensor") == 0
    kernels = _agreed_kernels(
        config,
        groups.all,
        device=device,
        splits_backward=schedule.splits_backward,
        say=files.say if files is not None else lambda line: None,
    )
    learning_rate = learning_rate_of(config)
    stages = [
        build_stage(
            config,
            schedule,
            needs,
            index=index,
            mesh=mesh,
            groups=groups,
            device=device,
            learning_rate=learning_rate,
            kernels=kernels,
        )
        for index in schedule.stages_of(rank)
    ]
    is_cpu = device.type == "cpu"
    recorder = Recorder(
        environment.rank,
        traced=config.logging.trace,
        synchronize=None if is_cpu else lambda: torch.cuda.current_stream(device).synchronize(),
        enabled=is_cpu or config.logging.trace,
    )
    parts = config.parallel.tensor if config.parallel.sequence_parallel else 1
    spec = TensorSpec(
        (config.train.micro_batch_size, config.model.seq_length // parts, config.model.hidden_size),
        DTYPES[config.train.dtype],
        device,
    )
    transport = Transport(
        spec,
        posted_ahead=2 + 2 * config.schedule.extra_in_flight,
        # a send to a neighbour is taken at the latest when its answer is needed, microbatches in flight later
        max_outstanding=max(max(phase.schedule.in_flight) for phase in phases) + 2,
        timeout=timeout if is_cpu else None,
    )
    updates = Updates(
        stages,
        num_stages=schedule.num_stages,
        num_microbatches=config.num_microbatches,
        max_skipped=config.train.max_skipped if config.train.on_nonfinite == "skip" else 0,
        clip_grad_norm=config.train.clip_grad_norm,
        norm=groups.norm,
        ends=groups.ends,
        looks_ahead=config.correction.name == "error_feedback",
        compensates=config.correction.name == "taylor",
        overlap=config.schedule.overlap_step,
        device=device,
        timeout=timeout,
        recorder=recorder,
    )
    channels = Channels(
        schedule.rank_of_stage,
        rank=rank,
        transport=transport,
        peers=mesh.ranks_along("pipeline"),
        groups=groups.messages,
    )
    channels.connect()
    share = DataShare(config.layout.index(mesh.rank, ("data", "expert")), config.data_ranks)
    executor = Executor(
        stages,
        training_source(config, tokens.train, share=share, device=device),
        updates,
        channels,
        rank=rank,
        name=f"rank {mesh.rank}",
        counts=counts,
        device=device,
        group=groups.all,
        recorder=recorder,
        notes=ActionNotes(environment.board, slot=environment.local_rank),
    )
    validation = tokens.validation and ValidationMicrobatches(
        tokens.validation,
        micro_batch_size=config.train.micro_batch_size,
        limit=config.train.eval_sequences,
        device=device,
        share=share,
    )
    checkpoints = None
    if files is not None and (config.checkpoint.interval is not None or files.resume is not None):
        checkpoints = _checkpoints(config, files, stages, updates, schedule, rank=mesh.rank, data=prepared.identity)
        if files.resume is not None:
            checkpoints.resume(files.resume, phases, learning_rate=learning_rate)
    return Trainer(
        config,
        phases,
        executor,
        validation,
        recorder=recorder,
        observer=observer,
        checkpoints=checkpoints,
        began=began,
        kernels=kernels.name,
    )


def _agreed_kernels(
    config: Config, group: RankGroup, *, device: torch.device, splits_backward: bool, say: Callable[[str], None]
) -> Kernels:
    """The backend, the same on all ranks: inside a layer that they share, two would not meet.

    Raises:
        ConfigError: on every rank.
    """
    fault: ConfigError | None = None
    kernels: Kernels = TORCH_KERNELS
    try:
        kernels = choose_kernels(
            config, reference=TORCH_KERNELS, device=device, splits_backward=splits_backward, say=say
        )
    except ConfigError as error:  # the others must hear of it before they wait for this rank
        fault = error
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


def _checkpoints(
    config: Config,
    files: CheckpointFiles,
    stages: list[PipelineStage],
    updates: Updates,
    schedule: PipelineSchedule,
    *,
    rank: int,
    data: Identity,
) -> RunCheckpoints:
    """All ranks call it together: it makes a group."""
    is_alone = not dist.is_initialized()
    group = None if is_alone else dist.new_group(backend="gloo", timeout=_SAVE_TIMEOUT)
    states = []
    for stage in stages:
        sizes = StageSizes(config, schedule, index=stage.index)
        states.append(
            StageState(
                stage,
                shapes=sizes.shapes,
                parts=sizes.parts(rank=rank),
                router_layers=[layer_number(n) for n in sizes.shapes if parameter_spec(n).role is Role.ROUTER],
            )
        )
    keeper = None
    if config.checkpoint.interval is not None:
        keeper = CheckpointKeeper(
            files.root,
            keep=config.checkpoint.keep,
            is_async=config.checkpoint.async_save,
            group=group,
            say=files.say,
        )
    return RunCheckpoints(config, keeper=keeper, states=states, updates=updates, group=group, data=data)
