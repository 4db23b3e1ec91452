"""From a config to a trainer: the only place that knows every package."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from megaasync.checkpoint.stage_state import StageState
from megaasync.checkpoint.writer import AsyncCheckpointWriter
from megaasync.config.pipeline import phases_of
from megaasync.config.schema import Config
from megaasync.data.identity import Identity
from megaasync.data.microbatches import DataShare, TokenSequences, ValidationMicrobatches
from megaasync.data.prepare import PreparedData
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.heartbeat import Heartbeat
from megaasync.distributed.mesh import Mesh
from megaasync.distributed.p2p import TensorSpec
from megaasync.models.parameters import layer_number, parameter_spec
from megaasync.observe.trace import Recorder
from megaasync.optim.routing import Role
from megaasync.pipeline.channels import Channels, Transport
from megaasync.pipeline.evaluation import Evaluator
from megaasync.pipeline.executor import Executor, RankPlace
from megaasync.pipeline.step_runner import StepPolicy, StepRunner
from megaasync.plan.sizes import DTYPES, StageSizes, buffers_required
from megaasync.schedules import Phase, PipelineSchedule, check
from megaasync.train.checkpointing import CheckpointManager
from megaasync.train.groups import Groups, connect_groups, make_groups
from megaasync.train.stages import agreed_kernels, build_stage, learning_rate_of
from megaasync.train.tokens import load_tokens, training_source
from megaasync.train.trainer import Observer, Trainer

_SAVE_TIMEOUT = timedelta(hours=1)  # of the ranks' agreement about a checkpoint, in the background


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Where checkpoints are.

    Attributes:
        root: folder of the run's own.
        resume: the one to go on from, or None.
        notify: tells the user, on rank 0.
    """

    root: Path
    resume: Path | None
    notify: Callable[[str], None]


def step_policy(config: Config, *, num_stages: int) -> StepPolicy:
    """How steps are made, by the config."""
    return StepPolicy(
        num_stages,
        config.num_microbatches,
        clip_grad_norm=config.train.clip_grad_norm,
        max_skipped=config.train.max_skipped if config.train.on_nonfinite == "skip" else 0,
        error_feedback=config.correction.name == "error_feedback",
        delay_compensation=config.correction.name == "taylor",
        overlap=config.schedule.overlap_step,
        timeout=timedelta(seconds=config.parallel.timeout_seconds),
    )


def _recorder(config: Config, environment: RankEnvironment, device: torch.device) -> Recorder:
    is_cpu = device.type == "cpu"
    return Recorder(
        environment.rank,
        traced=config.logging.trace,
        synchronize=None if is_cpu else lambda: torch.cuda.current_stream(device).synchronize(),
        enabled=is_cpu or config.logging.trace,
    )


def _place(mesh: Mesh, groups: Groups, device: torch.device) -> RankPlace:
    return RankPlace(
        mesh.coordinate("pipeline"),
        f"rank {mesh.rank}",
        reports_loss=mesh.coordinate("tensor") == 0,
        device=device,
        group=groups.all,
    )


def _channels(config: Config, phases: tuple[Phase, ...], mesh: Mesh, groups: Groups, device: torch.device) -> Channels:
    """The rank's channels, connected."""
    parts = config.parallel.tensor if config.parallel.sequence_parallel else 1
    spec = TensorSpec(
        (config.train.micro_batch_size, config.model.seq_length // parts, config.model.hidden_size),
        DTYPES[config.train.dtype],
        device,
    )
    transport = Transport(
        spec,
        prefetch_recvs=2 + 2 * config.schedule.extra_in_flight,
        # a send to a neighbour is taken at the latest when its answer is needed, microbatches in flight later
        max_outstanding=max(max(phase.schedule.in_flight) for phase in phases) + 2,
        timeout=timedelta(seconds=config.parallel.timeout_seconds) if device.type == "cpu" else None,
    )
    channels = Channels(
        phases[0].schedule.rank_of_stage,
        rank=mesh.coordinate("pipeline"),
        transport=transport,
        peers=mesh.ranks_along("pipeline"),
        groups=groups.messages,
    )
    channels.connect()
    return channels


def _evaluator(config: Config, executor: Executor, tokens: TokenSequences | None, *, share: DataShare) -> Evaluator:
    source = tokens and ValidationMicrobatches(
        tokens,
        micro_batch_size=config.train.micro_batch_size,
        limit=config.train.eval_sequences,
        device=executor.place.device,
        share=share,
    )
    return Evaluator(
        executor,
        source,
        error_feedback=config.correction.name == "error_feedback",
        delay_compensation=config.correction.name == "taylor",
    )


def _checkpoints(
    config: Config,
    files: CheckpointFiles,
    runner: StepRunner,
    schedule: PipelineSchedule,
    *,
    rank: int,
    data: Identity,
) -> CheckpointManager:
    """All ranks call it together: it makes a group."""
    is_alone = not dist.is_initialized()
    group = None if is_alone else dist.new_group(backend="gloo", timeout=_SAVE_TIMEOUT)
    states = []
    for stage in runner.stages.values():
        sizes = StageSizes(config, schedule, index=stage.place.index)
        states.append(
            StageState(
                stage,
                shapes=sizes.shapes,
                parts=sizes.parts(rank=rank),
                router_layers=[layer_number(n) for n in sizes.shapes if parameter_spec(n).role is Role.ROUTER],
            )
        )
    writer = None
    if config.checkpoint.interval is not None:
        writer = AsyncCheckpointWriter(
            files.root,
            keep=config.checkpoint.keep,
            is_async=config.checkpoint.async_save,
            group=group,
            notify=files.notify,
        )
    return CheckpointManager(config, writer=writer, states=states, runner=runner, group=group, data=data)


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
    needs = buffers_required(phases)
    tokens = load_tokens(config, prepared)
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    mesh = Mesh(config.parallel_dims, rank=environment.rank, device_type=device.type, timeout=timeout)
    groups = make_groups(mesh, schedule)
    connect_groups(groups, device=device)
    kernels = agreed_kernels(
        config,
        groups.all,
        device=device,
        splits_backward=schedule.splits_backward,
        notify=files.notify if files is not None else lambda line: None,
    )
    learning_rate = learning_rate_of(config)
    made_of = {"mesh": mesh, "groups": groups, "device": device, "learning_rate": learning_rate, "kernels": kernels}
    mine = schedule.stages_of(mesh.coordinate("pipeline"))
    stages = [build_stage(config, schedule, needs, index=index, **made_of) for index in mine]
    share = DataShare(config.parallel_dims.index(mesh.rank, ("data", "expert")), config.data_ranks)
    recorder = _recorder(config, environment, device)
    runner = StepRunner(
        [update for _, update in stages],
        step_policy(config, num_stages=schedule.num_stages),
        norm_group=groups.norm,
        embedding_group=groups.embedding,
        device=device,
        recorder=recorder,
    )
    executor = Executor(
        [compute for compute, _ in stages],
        training_source(config, tokens.train, share=share, device=device),
        runner,
        _channels(config, phases, mesh, groups, device),
        place=_place(mesh, groups, device),
        recorder=recorder,
        heartbeat=Heartbeat(environment.board, slot=environment.local_rank),
    )
    checkpoints = None
    if files is not None and (config.checkpoint.interval is not None or files.resume is not None):
        checkpoints = _checkpoints(config, files, runner, schedule, rank=mesh.rank, data=prepared.identity)
        if files.resume is not None:
            checkpoints.resume(files.resume, phases, learning_rate=learning_rate)
    return Trainer(
        config,
        phases,
        executor,
        _evaluator(config, executor, tokens.validation, share=share),
        observer=observer,
        checkpoints=checkpoints,
        began=began,
        kernels=kernels.name,
    )
