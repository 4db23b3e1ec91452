"""Small problems with known smoothness, run by the product's executor on one rank under any delay."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, nn

from megaasync.config.schema import OptimizerConfig
from megaasync.data.microbatches import Microbatch
from megaasync.distributed.p2p import TensorSpec
from megaasync.distributed.rank_group import ALONE
from megaasync.observe.trace import Recorder
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import Role, Route
from megaasync.optim.stage_optimizer import StageOptimizer
from megaasync.pipeline.channels import Channels, Transport
from megaasync.pipeline.executor import Executor, RankPlace
from megaasync.pipeline.shared_parts import StagePlace, make_shared_parts
from megaasync.pipeline.stage_compute import StageCompute
from megaasync.pipeline.stage_update import StageUpdate
from megaasync.pipeline.step_runner import StepPolicy, StepRunner
from megaasync.plan.sizes import buffers_required
from megaasync.schedules import make_phases

_TIMEOUT = timedelta(seconds=60)


class Problem(nn.Module, ABC):
    """A loss of one parameter `weight`; called as the last stage of a model is, with the step as its only token."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())

    @abstractmethod
    def loss(self, weight: Tensor, step: int) -> Tensor:
        """Scalar; may depend on the step through its noise."""

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:
        """The loss of the step that the microbatch names."""
        return self.loss(self.weight, int(microbatch.tokens_BS))


class _Steps:
    """A source whose microbatch is the number of its step."""

    def get(self, step: int, microbatch: int) -> Microbatch:
        number = torch.full((1, 1), step)
        return Microbatch(number, number, torch.ones(1, 1, dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class Setting:
    """How a problem is solved.

    Attributes:
        delay: in updates; 0 is synchronous.
        corrected: by error feedback, which looks `delay` updates ahead.
        lr: constant.
    """

    optimizer: OptimizerConfig
    delay: int
    corrected: bool
    lr: float
    steps: int


@dataclass(frozen=True, slots=True)
class Visit:
    """What a step saw.

    Attributes:
        loss: at the weights it ran at.
        z: the masters when its result was known; in float64.
    """

    loss: float
    grad_norm: float
    z: Tensor


def solve(problem: Problem, setting: Setting) -> Iterator[Visit]:
    """Run the executor; one visit per step."""
    rule_config, device = setting.optimizer, torch.device("cpu")
    name = "1f1b" if setting.delay == 0 else "2bw"
    (phase,) = make_phases(
        name,
        num_steps=setting.steps,
        sync_start_steps=0,
        sync_cooldown_steps=0,
        num_ranks=1,
        num_microbatches=1,
        virtual_stages=None,
        extra_in_flight=0,
        tied=False,
        delay=None if setting.delay == 0 else (setting.delay,),
    )
    needs = buffers_required((phase,))
    weight = problem.weight
    rules = rule_config.rules()
    matrix_rule = rules.matrices if weight.dim() == 2 else None
    route = Route(Role.MATRIX, matrix_rule or rules.elements, rule_config.weight_decay, matrix_rule is not None)
    layout = FlatParamLayout({"weight": tuple(weight.shape)}, {"weight": route})
    optimizer = StageOptimizer(layout, [weight.detach()], dtype=weight.dtype, learning_rate=lambda update: setting.lr)
    shared = make_shared_parts(
        problem,
        layout,
        num_versions=needs.versions[0],
        num_gradient_buffers=needs.gradient_buffers[0],
        gradient_dtype=weight.dtype,
    )
    place = StagePlace(0, 1)
    update = StageUpdate(place, shared, optimizer)
    recorder = Recorder(0, traced=False, synchronize=None, enabled=False)
    runner = StepRunner(
        [update],
        StepPolicy(1, 1, error_feedback=setting.corrected, overlap=False, timeout=_TIMEOUT),
        norm_group=ALONE,
        embedding_group=None,
        device=device,
        recorder=recorder,
    )
    transport = Transport(TensorSpec((1,), weight.dtype, device), prefetch_recvs=2, max_outstanding=3, timeout=_TIMEOUT)
    executor = Executor(
        [StageCompute(place, shared)],
        _Steps(),
        runner,
        Channels(phase.schedule.rank_of_stage, rank=0, transport=transport, peers=(0,), groups={}),
        place=RankPlace(0, "rank 0", reports_loss=True, device=device, group=ALONE),
        recorder=recorder,
    )
    try:
        for result in executor.run(phase, 0, setting.steps, flush=True):
            z = update.master[: weight.numel()].view(weight.shape)
            yield Visit(result.loss, result.grad_norm, z.to(torch.float64, copy=True))
    finally:
        executor.close()
