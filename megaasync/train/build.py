"""From a config to a trainer: the only place that knows all rooms."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import distributed as dist

from megaasync.config.pipeline import phases_of
from megaasync.config.schema import IndexedData, SyntheticData, TrainConfig
from megaasync.data.indexed_dataset import IndexedDataset
from megaasync.data.microbatches import TokenSequences, TrainingMicrobatches, ValidationMicrobatches
from megaasync.data.prepare import PreparedData
from megaasync.data.synthetic import MarkovSource
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.p2p import TensorSpec
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import TIED_PARAMETER, DecoderStage
from megaasync.nn.precision import at_least_float32
from megaasync.observe.trace import Recorder
from megaasync.optim.flat_layout import FlatLayout
from megaasync.optim.lr_schedule import lr_schedule
from megaasync.optim.routing import route_parameters
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.channels import Channels, Transport, group_names
from megaasync.pipeline.executor import Executor
from megaasync.pipeline.stage import PipelineStage
from megaasync.pipeline.updates import Updates
from megaasync.schedules import PipelineSchedule, check
from megaasync.train.plan import DTYPES, StageNeeds, layers_of_stages, needs_of
from megaasync.train.trainer import Observer, Trainer


@dataclass(frozen=True, slots=True)
class _Tokens:
    train: TokenSequences
    validation: TokenSequences | None


def _load_tokens(config: TrainConfig, prepared: PreparedData) -> _Tokens:
    def cut(tokens: np.ndarray, name: str) -> TokenSequences:
        return TokenSequences(tokens, seq_length=config.model.seq_length, vocab_size=config.model.vocab_size, name=name)

    if isinstance(config.data, SyntheticData):
        chain = MarkovSource(
            vocab_size=config.model.vocab_size, branching=config.data.branching, seed=config.train.seed
        )
        held_out = max(config.data.num_tokens // 10, config.model.seq_length + 1)
        return _Tokens(
            cut(chain.tokens(num_tokens=config.data.num_tokens, stream=0), "synthetic data"),
            cut(chain.tokens(num_tokens=held_out, stream=1), "synthetic validation data"),
        )
    train = IndexedDataset(prepared.train).tokens
    if prepared.validation is None:
        return _Tokens(cut(train, prepared.train), None)
    validation = IndexedDataset(prepared.validation).tokens
    is_split = not isinstance(config.data, IndexedData)  # a path given by the user is held to what it says
    too_short = is_split and len(validation) <= config.model.seq_length
    return _Tokens(cut(train, prepared.train), None if too_short else cut(validation, prepared.validation))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules made within have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_stage(
    config: TrainConfig, schedule: PipelineSchedule, needs: StageNeeds, *, index: int, device: torch.device
) -> PipelineStage:
    """One stage with its weights, versions, gradient sums and optimizer."""
    layers = layers_of_stages(config)[index]
    dtype = DTYPES[config.train.dtype]
    with _default_dtype(dtype), device:
        module = DecoderStage(config.model, layers)
    initialize_(module, config.model, seed=config.train.seed)
    parameters = dict(module.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    layout = FlatLayout(shapes, route_parameters(shapes, config.optimizer))
    optimizer = StageOptimizer(
        layout,
        [parameter.detach() for parameter in parameters.values()],
        dtype=at_least_float32(dtype),
        learning_rate=lr_schedule(config.train, peak=config.optimizer.lr),
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
        tied_parameter=TIED_PARAMETER if schedule.is_tied and index in (0, schedule.num_stages - 1) else None,
    )


@dataclass(frozen=True, slots=True)
class _Groups:
    """Process groups of one rank; None where it is alone."""

    all: dist.ProcessGroup | None
    by_use: dict[str, dist.ProcessGroup | None]


def _make_groups(schedule: PipelineSchedule, *, several: bool, timeout: timedelta) -> _Groups:
    """Groups for messages, one for the norm, which a thread of its own uses, and one for what all do together."""

    def new(ranks: list[int] | None = None) -> dist.ProcessGroup | None:
        return dist.new_group(ranks, timeout=timeout) if several else None

    by_use = {name: new() for name in (*group_names(schedule.rank_of_stage), "norm")}
    if schedule.is_tied:
        ends = sorted({schedule.rank_of_stage[0], schedule.rank_of_stage[-1]})
        by_use["tied"] = new(ends) if len(ends) == 2 else None
    return _Groups(new(), by_use)


def build_trainer(
    config: TrainConfig,
    *,
    environment: RankEnvironment,
    prepared: PreparedData,
    device: torch.device,
    observer: Observer | None = None,
) -> Trainer:
    """Everything one rank needs; the process group must be there if there are several ranks.

    Args:
        config: validated.
        environment: this rank's place.
        prepared: where the tokens are.
        device: this rank's device.
        observer: gets every row of metrics; rank 0 only.

    Raises:
        DataError: the tokens cannot be used.
    """
    phases = phases_of(config)
    for phase in phases:
        check(phase.schedule)
    schedule = phases[0].schedule  # all phases have the same stages on the same ranks
    needs = needs_of(phases)
    tokens = _load_tokens(config, prepared)
    rank, several = environment.rank, environment.world_size > 1
    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    groups = _make_groups(schedule, several=several, timeout=timeout)
    stages = [build_stage(config, schedule, needs, index=index, device=device) for index in schedule.stages_of(rank)]
    is_cpu = device.type == "cpu"
    recorder = Recorder(
        rank,
        traced=config.logging.trace,
        synchronize=None if is_cpu else lambda: torch.cuda.current_stream(device).synchronize(),
        enabled=is_cpu or config.logging.trace,
    )
    spec = TensorSpec(
        (config.train.micro_batch_size, config.model.seq_length, config.model.hidden_size),
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
        clip_grad_norm=config.train.clip_grad_norm,
        groups=groups.by_use,
        corrects=config.correction.name == "error_feedback",
        overlap=config.schedule.overlap_step,
        device=device,
        timeout=timeout,
        recorder=recorder,
    )
    channels = Channels(schedule.rank_of_stage, rank=rank, transport=transport, groups=groups.by_use)
    channels.connect()
    executor = Executor(
        stages,
        TrainingMicrobatches(
            tokens.train,
            micro_batch_size=config.train.micro_batch_size,
            num_microbatches=config.num_microbatches,
            seed=config.train.seed,
            device=device,
        ),
        updates,
        channels,
        rank=rank,
        device=device,
        group=groups.all,
        timeout=timeout,
        recorder=recorder,
    )
    validation = tokens.validation and ValidationMicrobatches(
        tokens.validation,
        micro_batch_size=config.train.micro_batch_size,
        limit=config.train.eval_sequences,
        device=device,
    )
    return Trainer(config, phases, executor, validation, recorder=recorder, observer=observer)
