"""Emulated compute on our engine: every action sleeps its cost; transport, threads and tables are the real ones."""

import time
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megaasync.config.parallel_dims import AXES, ParallelDims
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group, leave_group
from megaasync.distributed.mesh import Mesh
from megaasync.distributed.p2p import Receiver, TensorSpec
from megaasync.distributed.rank_group import ALONE, RankGroup
from megaasync.observe.trace import Recorder, Timeline, merge
from megaasync.pipeline.channels import Channels, Transport, group_names
from megaasync.pipeline.executor import Executor, RankPlace
from megaasync.pipeline.shared_parts import StagePlace
from megaasync.pipeline.step_runner import StepPolicy, StepRunner
from megaasync.schedules import Costs, Phase, PipelineSchedule, build_schedule, schedule_metrics, simulate
from megaasync.update_rules.newton_schulz import orthogonalize

from .case import Case, Emulation, Measured

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=120)
_SPEC = TensorSpec((64,), torch.float64, _CPU)


def sleep_until(moment: float) -> None:
    """Sleep to a moment of `perf_counter`."""
    if (left := moment - perf_counter()) > 0:
        time.sleep(left)


class EmulatedCompute:
    """Stands where a `StageCompute` stands and sleeps."""

    def __init__(self, place: StagePlace, costs: Emulation, *, share: float) -> None:
        """A stage whose forward and backward cost `share` of a rank's."""
        self.place, self._costs, self._share = place, costs, share
        self.needs_mask = False

    def _message(self) -> Tensor:
        return torch.zeros(_SPEC.shape, dtype=_SPEC.dtype)

    def forward(self, key: Any, x: Any, microbatch: Any, *, version: int) -> Tensor | None:
        """Sleep a forward."""
        time.sleep(self._costs.forward * self._share)
        return None if self.place.is_last else self._message()

    def backward(self, key: Any, grad: Any, *, version: int) -> Tensor | None:
        """Sleep a backward."""
        time.sleep(self._costs.backward * self._share)
        return None if self.place.is_first else self._message()

    def backward_input(self, key: Any, grad: Any, *, version: int) -> Tensor | None:
        """Sleep half a backward."""
        time.sleep(self._costs.backward / 2 * self._share)
        return None if self.place.is_first else self._message()

    def backward_weight(self, key: Any) -> None:
        """Sleep the other half."""
        time.sleep(self._costs.backward / 2 * self._share)

    def take_sums(self, step: int) -> Tensor:
        """A loss and a token, so that both are numbers."""
        return torch.ones(2, dtype=torch.float64)


class EmulatedUpdate:
    """Stands where a `StageUpdate` stands and sleeps."""

    def __init__(self, place: StagePlace, costs: Emulation, *, share: float, replicas: RankGroup) -> None:
        """A stage; `replicas` is the group of its data-parallel copies, for real updates."""
        self.place, self._costs, self._share, self._replicas = place, costs, share, replicas
        self._gradient = torch.ones(1 << 21)  # 8 MiB
        self._matrices = torch.randn(8, 256, 256, generator=torch.Generator().manual_seed(place.index))
        self.num_updates = 0

    def reduce(self, step: int) -> None:
        """Sleep a reduction, or make one."""
        self._replicas.all_reduce(self._gradient)
        time.sleep(self._costs.reduce * self._share)

    def routing_stats(self, step: int) -> None:
        """No experts."""

    def squares(self, step: int) -> Tensor:
        """A norm."""
        return torch.ones((), dtype=torch.float64)

    def step(self, step: int, *, scale: float, lookahead_steps: int) -> None:
        """Sleep an optimizer step, or make Muon's."""
        if self._costs.real_update:
            orthogonalize(self._matrices, steps=5)
        time.sleep(self._costs.step * self._share)
        self.num_updates += 1


class DelayedChannels(Channels):
    """Channels whose messages carry the time they were sent at, and may be used only `hop` later."""

    def __init__(self, *args: Any, hop: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hop = hop

    def send(self, direction: str, stage: int, tensor: Tensor) -> None:
        """Stamp and send."""
        tensor[0] = perf_counter()
        super().send(direction, stage, tensor)

    def recv(self, direction: str, stage: int) -> Tensor:
        """Take, and wait out the hop if the message came from another rank."""
        tensor = super().recv(direction, stage)
        if isinstance(self._into[direction, stage], Receiver):
            sleep_until(tensor[0].item() + self._hop)
        return tensor


class _NoData:
    def get(self, step: int, microbatch: int) -> None:
        """Nothing: emulated stages read no tokens."""


@dataclass(frozen=True, slots=True)
class EmulatedRun:
    """Figures and the timeline they are from."""

    measured: Measured
    timeline: Timeline


def run_rank(environment: RankEnvironment, case: Case, costs: Emulation) -> list[Any]:
    """One rank's spans."""
    join_group(environment, device=_CPU, timeout=_TIMEOUT)
    torch.set_num_threads(1)
    schedule = schedule_of(case)
    mesh = Mesh(
        ParallelDims(pipeline=case.num_ranks, data=costs.replicas),
        rank=environment.rank,
        device_type="cpu",
        timeout=_TIMEOUT,
    )
    share, rank = schedule.num_ranks / schedule.num_stages, mesh.coordinate("pipeline")
    replicas = mesh.new_group("data")
    places = [StagePlace(index, schedule.num_stages) for index in schedule.stages_of(rank)]
    recorder = Recorder(rank, traced=True, synchronize=None, enabled=True)
    runner = StepRunner(
        [EmulatedUpdate(place, costs, share=share, replicas=replicas) for place in places],
        StepPolicy(schedule.num_stages, schedule.num_microbatches, overlap=case.overlap, timeout=_TIMEOUT),
        norm_group=mesh.new_group(*AXES),
        embedding_group=None,
        device=_CPU,
        recorder=recorder,
    )
    transport = Transport(
        _SPEC,
        prefetch_recvs=2 + 2 * case.extra_in_flight,
        max_outstanding=max(schedule.in_flight) + 2,
        timeout=_TIMEOUT,
    )
    channels = DelayedChannels(
        schedule.rank_of_stage,
        rank=rank,
        transport=transport,
        peers=mesh.ranks_along("pipeline"),
        groups={name: mesh.new_group("pipeline").handle for name in group_names(schedule.rank_of_stage)},
        hop=costs.hop,
    )
    executor = Executor(
        [EmulatedCompute(place, costs, share=share) for place in places],
        _NoData(),
        runner,
        channels,
        place=RankPlace(rank, f"rank {mesh.rank}", reports_loss=True, device=_CPU, group=ALONE),
        recorder=recorder,
    )
    dist.barrier()
    for _ in executor.run(Phase(schedule, 0, case.num_steps, flush_at_end=False), 0, case.num_steps, flush=True):
        pass
    dist.barrier()
    leave_group()
    return list(recorder.spans)


def measure(parts: list[list[Any]], case: Case) -> EmulatedRun:
    """Put the ranks' spans together.

    The period is taken between the last backwards of two steps on rank 0, so fill and drain are outside.
    """
    timeline = merge([(spans, []) for spans in parts])
    ends: dict[int, float] = {}
    for span in parts[0]:
        if span.action.op.value in "BIW":
            ends[span.action.step] = max(ends.get(span.action.step, 0.0), span.end)
    first, last = 1, case.num_steps - 2
    period = (ends[last] - ends[first]) / (last - first)
    return EmulatedRun(Measured(period, timeline.bubble(num_steps=case.num_steps)), timeline)


def schedule_of(case: Case) -> PipelineSchedule:
    """The tables of a case of ours."""
    return build_schedule(
        case.schedule,
        num_ranks=case.num_ranks,
        num_microbatches=case.num_microbatches,
        extra_in_flight=case.extra_in_flight,
    )


def costs_of(case: Case, costs: Emulation) -> Costs:
    """The simulator's costs for the same case."""
    share = case.num_ranks / schedule_of(case).num_stages
    return Costs(
        costs.forward * share,
        costs.backward * share,
        costs.backward * share / 2,
        reduce=costs.reduce * share,
        step=costs.step * share,
        hop=costs.hop,
    )


def planned(case: Case, costs: Emulation) -> Measured:
    """What the simulator says of the same case: the steady state's period, and the bubble of as many steps."""
    schedule, plan_costs = schedule_of(case), costs_of(case, costs)
    spans = simulate(schedule, num_steps=case.num_steps, costs=plan_costs, overlap=case.overlap)
    metrics = schedule_metrics(schedule, costs=plan_costs, overlap=case.overlap)
    return Measured(metrics.period, Timeline(spans, case.num_ranks).bubble(num_steps=case.num_steps))
