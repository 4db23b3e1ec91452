"""torch.distributed.pipelining's schedules on the same emulated costs, or on the same model and optimizer, as ours."""

import logging
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import pipelining

from megaasync.config.schema import Config
from megaasync.data.microbatches import TokenSequences, TrainingMicrobatches
from megaasync.data.synthetic import MarkovSource
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group, leave_group
from megaasync.models.initialize import initialize_
from megaasync.models.parameters import roles_of
from megaasync.models.partition import partition_layers
from megaasync.models.transformer import DecoderStage
from megaasync.nn.loss import cross_entropy_sum
from megaasync.nn.precision import at_least_float32
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.lr_schedule import LearningRate, LrShape
from megaasync.optim.routing import route_parameters
from megaasync.optim.sharded_reducer import sum_of_squares
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.gradients import GradientBuffers
from megaasync.pipeline.weight_versions import WeightVersions
from megaasync.plan.sizes import DTYPES

from .case import TORCH_SCHEDULES, Case, Emulation, Measured
from .emulated import sleep_until

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=120)

_SINGLE = ("ScheduleGPipe", "Schedule1F1B")


def stages_of(case: Case, rank: int) -> list[int]:
    """The stages of a rank."""
    virtual_stages, is_v = TORCH_SCHEDULES[case.schedule]
    last = case.num_ranks * virtual_stages - 1
    return [rank, last - rank] if is_v else [rank + chunk * case.num_ranks for chunk in range(virtual_stages)]


def num_stages(case: Case) -> int:
    """Stages of the whole model."""
    return case.num_ranks * TORCH_SCHEDULES[case.schedule][0]


def make_schedule(case: Case, stages: list[pipelining.PipelineStage], loss: Callable[[Any, Any], Tensor]) -> Any:
    """The schedule over a rank's stages; gradients are sums, as ours are."""
    kind = getattr(pipelining, case.schedule, None) or getattr(pipelining.schedules, case.schedule)
    given = stages[0] if case.schedule in _SINGLE else stages
    return kind(given, case.num_microbatches, loss_fn=loss, scale_grads=False)


@contextmanager
def _quiet() -> Any:
    logger = logging.getLogger("torch.distributed.pipelining")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


Spans = list[tuple[float, float]]  # start and end of every sleep: what counts as busy


def _sleep(seconds: float, log: Spans) -> None:
    start = perf_counter()
    time.sleep(seconds)
    log.append((start, perf_counter()))


class _Sleep(torch.autograd.Function):
    """Sleeps forward and backward; its tensors carry the time they were made at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float, hop: float, log: Spans) -> Tensor:
        ctx.backward_seconds, ctx.hop, ctx.log = backward, hop, log
        sleep_until(x.flatten()[0].item() + hop)
        _sleep(forward, log)
        return torch.full_like(x, perf_counter())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # noqa: ANN001 - torch's
        sleep_until(grad.flatten()[0].item() + ctx.hop)
        _sleep(ctx.backward_seconds, ctx.log)
        return torch.full_like(grad, perf_counter()), None, None, None, None


class _SleepWeight(torch.autograd.Function):
    """Adds nothing, and sleeps when its weight's gradient is taken."""

    @staticmethod
    def forward(ctx, weight: Tensor, backward: float, log: Spans) -> Tensor:  # noqa: ANN001 - torch's
        ctx.backward_seconds, ctx.log = backward, log
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001 - torch's
        _sleep(ctx.backward_seconds, ctx.log)
        return torch.zeros_like(grad), None, None


class EmulatedModule(nn.Module):
    """One emulated stage: half of its backward belongs to the input, half to the weight."""

    def __init__(self, costs: Emulation, log: Spans, *, share: float, width: int, is_first: bool) -> None:
        super().__init__()
        self._log = log
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=torch.float64))
        self._costs, self._share, self._is_first = costs, share, is_first

    def forward(self, x: Tensor) -> Tensor:
        """[1, width] to [1, width]."""
        costs, share = self._costs, self._share
        if self._is_first:
            x = x.detach().zero_().requires_grad_(True)
        half = costs.backward / 2 * share
        slept = _Sleep.apply(x, costs.forward * share, half, costs.hop, self._log)
        return slept + _SleepWeight.apply(self.weight, half, self._log)


def _zero_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * 0).sum()


def measure_emulated(parts: list[tuple[list[float], Spans]], case: Case) -> Measured:
    """Period of rank 0 between two steps' ends; bubble of all ranks in that time."""
    ends = parts[0][0]
    start, end = ends[1], ends[-2]
    busy = sum(max(min(b, end) - max(a, start), 0.0) for _, log in parts for a, b in log)
    return Measured((end - start) / (len(ends) - 3), 1 - busy / (case.num_ranks * (end - start)))


def run_emulated_rank(environment: RankEnvironment, case: Case, costs: Emulation) -> tuple[list[float], Spans]:
    """One rank of an emulated run: times at which steps ended, and when it was busy."""
    join_group(environment, device=_CPU, timeout=_TIMEOUT)
    torch.set_num_threads(1)
    width, m = 64, case.num_microbatches
    example = torch.zeros(1, width, dtype=torch.float64, requires_grad=True)  # what needs no gradient gets none
    share = case.num_ranks / num_stages(case)
    log: Spans = []
    stages = [
        pipelining.PipelineStage(
            EmulatedModule(costs, log, share=share, width=width, is_first=index == 0),
            index,
            num_stages(case),
            _CPU,
            input_args=(example.detach() if index == 0 else example,),
            output_args=(example,),
        )
        for index in stages_of(case, environment.rank)
    ]
    norm_group = dist.new_group(timeout=_TIMEOUT)
    with _quiet():
        schedule = make_schedule(case, stages, _zero_loss)
        has_first = 0 in stages_of(case, environment.rank)
        has_last = num_stages(case) - 1 in stages_of(case, environment.rank)
        batch = torch.zeros(m, width, dtype=torch.float64)
        ends = []
        for _ in range(case.num_steps):
            given = (batch,) if has_first else ()
            schedule.step(*given, **({"target": batch} if has_last else {}), return_outputs=False)
            time.sleep(costs.reduce)
            terms = torch.zeros(4, dtype=torch.float64)
            dist.all_reduce(terms, group=norm_group)
            time.sleep(costs.step)
            ends.append(perf_counter())
    leave_group()
    return ends, log


class _FirstOrMiddle(nn.Module):
    def __init__(self, stage: DecoderStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        stage = self.stage
        if stage.embedding is not None:
            x = stage.embedding(x)
        for layer in stage.layers.values():
            x = layer(x, stage.rotary, torch.ones(x.shape[:2], dtype=torch.bool), None)
        return x


class _Last(_FirstOrMiddle):
    def forward(self, x: Tensor) -> Tensor:
        return self.stage.head(self.stage.final_norm(super().forward(x)))


def _loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return cross_entropy_sum(logits_BSV, labels_BS, torch.ones_like(labels_BS, dtype=torch.bool))


class _Updated:
    """A stage's weights in one flat buffer, gradient sum and optimizer: the same kernels as in our engine."""

    def __init__(self, module: DecoderStage, config: Config) -> None:
        parameters = dict(module.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        layout = FlatParamLayout(shapes, route_parameters(roles_of(shapes), config.optimizer))
        dtype = at_least_float32(DTYPES[config.train.dtype])
        self.optimizer = StageOptimizer(
            layout,
            [parameter.detach() for parameter in parameters.values()],
            dtype=dtype,
            learning_rate=LearningRate(LrShape.of(config.train), peak=config.optimizer.lr),
        )
        self.versions = WeightVersions(module, layout, num_slots=1)
        self.gradients = GradientBuffers([module], layout, num_buffers=1, dtype=dtype)

    def attach(self, step: int) -> None:
        """Gradients add to the sum of a step through autograd, whose graph torch's split backwards look into."""
        module = self.versions.module(0)
        self.gradients.attach(module, step)
        for parameter in module.parameters():
            del parameter.main_grad


def run_real_rank(environment: RankEnvironment, case: Case, config: Config) -> tuple[list[float], list[float]]:
    """One rank of a real run: times at which steps ended, and losses (on the last stage's rank)."""
    join_group(environment, device=_CPU, timeout=_TIMEOUT)
    torch.set_num_threads(1)
    count, model, train = num_stages(case), config.model, config.train
    updated, stages = [], []
    hidden = torch.zeros(train.micro_batch_size, model.seq_length, model.hidden_size, requires_grad=True)
    tokens = torch.zeros(train.micro_batch_size, model.seq_length, dtype=torch.int64)
    logits = torch.zeros(train.micro_batch_size, model.seq_length, model.vocab_size, requires_grad=True)
    for index in stages_of(case, environment.rank):
        module = DecoderStage(model, partition_layers(model, num_stages=count)[index])
        initialize_(dict(module.named_parameters()), model, seed=train.seed)
        updated.append(_Updated(module, config))
        is_last = index == count - 1
        stages.append(
            pipelining.PipelineStage(
                _Last(module) if is_last else _FirstOrMiddle(module),
                index,
                count,
                _CPU,
                input_args=(tokens if index == 0 else hidden,),
                output_args=(logits if is_last else hidden,),
            )
        )
    chain = MarkovSource(vocab_size=model.vocab_size, branching=config.data.branching, seed=train.seed)
    sequences = TokenSequences(
        chain.tokens(num_tokens=config.data.num_tokens, stream=0),
        seq_length=model.seq_length,
        vocab_size=model.vocab_size,
        name="synthetic data",
    )
    source = TrainingMicrobatches(
        sequences,
        micro_batch_size=train.micro_batch_size,
        num_microbatches=case.num_microbatches,
        seed=train.seed,
        device=_CPU,
    )
    norm_group = dist.new_group(timeout=_TIMEOUT)
    held = stages_of(case, environment.rank)
    with _quiet():
        schedule = make_schedule(case, stages, _loss)
        ends, losses = [], []
        for step in range(case.num_steps):
            microbatches = [source.get(step, i) for i in range(case.num_microbatches)]
            for stage in updated:
                stage.attach(step)
            given = (torch.cat([microbatch.tokens_BS for microbatch in microbatches]),) if 0 in held else ()
            of_step: list[Tensor] = []
            last = {"target": torch.cat([microbatch.labels_BS for microbatch in microbatches]), "losses": of_step}
            schedule.step(*given, **(last if count - 1 in held else {}), return_outputs=False)
            terms = torch.zeros(2, dtype=torch.float64)
            terms[0] = sum(sum_of_squares(stage.gradients.sum_of(step)) for stage in updated)
            terms[1] = sum(loss.detach().double() for loss in of_step)
            dist.all_reduce(terms, group=norm_group)
            num_tokens = train.global_batch_size * model.seq_length
            norm = terms[0].item() ** 0.5 / num_tokens
            scale = min(1.0, (train.clip_grad_norm or float("inf")) / norm) / num_tokens
            for stage in updated:
                stage.optimizer.step(
                    stage.gradients.sum_of(step), scale=scale, out=stage.versions.flat(0), lookahead_steps=0
                )
            ends.append(perf_counter())
            losses.append(terms[1].item() / num_tokens)
    leave_group()
    return ends, losses
