"""The one executor: runs this rank's slice of a schedule's table, whatever the schedule. There is no `if async`."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from megaasync.data.microbatches import Microbatch, MicrobatchSource
from megaasync.distributed import TransportError
from megaasync.distributed.heartbeat import Heartbeat
from megaasync.distributed.rank_group import RankGroup
from megaasync.observe.trace import Recorder
from megaasync.pipeline import TrainingError
from megaasync.pipeline.channels import Channels
from megaasync.pipeline.stage_compute import StageCompute
from megaasync.pipeline.step_runner import StepRunner
from megaasync.pipeline.step_stats import StepResult
from megaasync.schedules import COMPUTE_OPS, Action, Op, Phase, PipelineSchedule, Segment, unroll
from megaasync.schedules.receives import Channel, LastNeeds, UpcomingReceives

_GRAD_NORM = "the global gradient norm"
_LAYERS = "the ranks that share its layers (parallel.tensor, parallel.expert)"
_WAITED_FOR = {
    Op.F: "the input of its forward",
    Op.B: "the gradient for its backward",
    Op.I: "the gradient for its backward",
}
_EVALUATION_SLICE = 32  # microbatches between two looks at whether to stop


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss in nats over the valid tokens of an evaluation, and whether some rank asked to stop."""

    loss: float | None
    stop: bool


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of the run.

    Attributes:
        rank: on the pipeline axis.
        name: in messages.
        reports_loss: its losses are counted; tensor-parallel ranks all have the same.
        device: of its stages.
        group: all ranks.
    """

    rank: int
    name: str
    reports_loss: bool
    device: torch.device
    group: RankGroup


class Executor:
    """Runs segments of a schedule on one rank.

    Attributes:
        stages: the computing halves of this rank's stages.
        runner: of their updating halves.
        place: of this rank.
        recorder: gets start and end of every action.
        heartbeat: where it notes what it does.
    """

    def __init__(
        self,
        stages: list[StageCompute],
        source: MicrobatchSource,
        runner: StepRunner,
        channels: Channels,
        *,
        place: RankPlace,
        recorder: Recorder,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Put the executor of one rank together.

        Args:
            stages: this rank's.
            source: training microbatches by address.
            runner: of the same stages.
            channels: of the same stages.
            place: of this rank.
            recorder: gets start and end of every action.
            heartbeat: notes every action before it begins; None for nobody.
        """
        self.stages, self.runner, self.place, self.recorder = stages, runner, place, recorder
        self._source, self._channels = source, channels
        self.heartbeat = heartbeat or Heartbeat(None, slot=0)
        self._stage = {stage.place.index: stage for stage in stages}
        self._run: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weight,
            Op.REDUCE_GRAD: self._reduce_gradient,
            Op.SYNC: self._sync,
            Op.STEP: runner.step,
        }
        # as many microbatches as a channel lets go out without waiting; one stage at a time needs no more than one
        self._evaluation_group = channels.max_outstanding if len(stages) > 1 else 1
        self._schedule: PipelineSchedule | None = None
        self._segment: Segment | None = None
        self._needs: dict[int, LastNeeds] = {}  # by id of the schedule, which they keep

    @property
    def skipped(self) -> list[int]:
        """Batches left out because a number was not finite."""
        return self.runner.skipped

    def request_stop(self) -> None:
        """Ask for an end: all ranks hear of it with the next global norm and end after the same step."""
        self.runner.stop_requested = True

    def forget_stop(self) -> None:
        """No step is left that a stop could come before."""
        self.runner.stop_requested = False

    def run(self, phase: Phase, first_step: int, end_step: int, *, flush: bool = False) -> Iterator[StepResult]:
        """Run the steps [first_step, end_step) of a phase from an empty pipeline to an empty pipeline.

        Gradients that the delay leaves pending stay pending unless `flush`. With first_step == end_step and `flush`,
        only those are applied.

        Yields:
            One result per batch, in order, as soon as its global norm is known here.

        Raises:
            TrainingError: a loss or gradient is not finite; every rank raises in the same step.
            TransportError: another rank is hung or gone.
        """
        schedule = self._schedule = phase.schedule
        segment = self._segment = Segment(schedule, first_step, end_step)
        self.runner.begin(phase, segment)
        upcoming = UpcomingReceives(segment, rank=self.place.rank, needs=self._needs_in(schedule), flush=flush)
        with self._located("the start of a segment"):
            self._permit(upcoming.start())
        actions = unroll(schedule, segment, rank=self.place.rank, flush=flush)
        try:
            for action in actions:
                self._run_noted(action, upcoming)
                yield from self.runner.take_new_results()
            with self._located(f"step {segment.end}, the global gradient norm"):
                self.runner.wait_for_results()
            yield from self.runner.take_new_results()
        except TrainingError:
            yield from self.runner.take_new_results()
            self._wait_for_all()
            raise
        with self._located("the end of a segment"):
            self._channels.flush()

    def close(self) -> None:
        """End what runs in the background; the executor runs nothing after."""
        self.runner.close()

    def _wait_for_all(self) -> None:
        """Before an end that all ranks come to: those not there yet need messages that this one still holds."""
        with suppress(TransportError):
            self._sum_over_ranks(torch.zeros(1, device=self.place.device))

    def _needs_in(self, schedule: PipelineSchedule) -> LastNeeds:
        """Of this rank's receives; the phases of a run have few schedules, and many segments."""
        if id(schedule) not in self._needs:
            self._needs[id(schedule)] = LastNeeds(schedule, rank=self.place.rank)
        return self._needs[id(schedule)]

    def _permit(self, channels: list[Channel]) -> None:
        """Receives that may be posted, one for each mention of a channel."""
        for op, sender in channels:
            self._channels.permit("forward" if op is Op.F else "backward", sender)

    def _run_noted(self, action: Action, upcoming: UpcomingReceives) -> None:
        """Run one action, and post the receives that it makes possible; an error tells where in the table it was."""
        self.heartbeat.beat(action.describe())
        try:
            self._permit(upcoming.before(action))
            self._run[action.op](action)
            self._permit(upcoming.after(action))
        except TrainingError:
            raise
        except TransportError as error:
            microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
            place = f"stage {action.stage}, step {action.step + 1}{microbatch}"
            in_layers = error.peer is None and action.op in COMPUTE_OPS
            what = _LAYERS if in_layers else _WAITED_FOR.get(action.op, _GRAD_NORM)
            raise self._explained(error, f"{place}: waited for {what}") from error
        except Exception as error:
            note = f"{self.place.name} was at {action} of schedule {self._schedule.name}"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]  # add_note is new in Python 3.11
            raise

    @contextmanager
    def _located(self, place: str) -> Iterator[None]:
        """A transport error inside says where it was."""
        try:
            yield
        except TransportError as error:
            raise self._explained(error, f"{place}: waited") from error

    def _explained(self, error: TransportError, waiting: str) -> TransportError:
        """The error with who waited for what and whom, and what to do."""
        owners = self._schedule.rank_of_stage if self._schedule else ()
        where = self._channels.peers.index(error.peer) if error.peer in self._channels.peers else None
        there = ", ".join(str(stage) for stage, rank in enumerate(owners) if rank == where)
        whom = "" if error.peer is None else f" from rank {error.peer} (stage {there})"
        if error.is_lost:
            remedy = "a rank has ended or its host is gone; its own last message says why"
        else:
            who = "some rank has not submitted its part: it" if error.peer is None else "it"
            remedy = f"{who} hangs or is that slow; look at its last message, or raise parallel.timeout_seconds"
        message = f"{self.place.name}, {waiting}{whom}, and {error}: {remedy}"
        return TransportError(message, peer=error.peer, is_lost=error.is_lost)

    def evaluate(self, source: MicrobatchSource, *, num_microbatches: int, versions: Mapping[int, int]) -> Evaluation:
        """Mean loss over a source's microbatches, forward only, with an empty pipeline; the same on every rank.

        A stop that some rank asks for is acted on between slices of microbatches; the loss is then None.

        Args:
            source: addressed as (0, microbatch).
            num_microbatches: how many.
            versions: which weights each stage of this rank runs on.
        """
        total = torch.zeros(3, dtype=torch.float64, device=self.place.device)
        for first in range(0, num_microbatches, _EVALUATION_SLICE):
            numbers = range(first, min(first + _EVALUATION_SLICE, num_microbatches))
            self.heartbeat.beat("evaluation")
            with self._located("an evaluation"):
                total += self._evaluate_slice(source, numbers, versions)
            if total[2] > 0:
                return Evaluation(None, True)
        return Evaluation((total[0] / total[1].clamp_min(1)).item(), False)

    def _evaluate_slice(self, source: MicrobatchSource, numbers: range, versions: Mapping[int, int]) -> Tensor:
        """[3] float64 over all ranks: loss sum, valid tokens, ranks that asked to stop.

        A rank with several stages takes a group of microbatches through one stage before the next, so that the other
        ranks have something to do meanwhile.
        """
        if len(self.stages) == 1:  # its messages need nothing of this rank
            self._channels.permit_for("forward", self.stages[0].place.index, len(numbers))
        total = torch.zeros(3, dtype=torch.float64, device=self.place.device)
        for first in range(numbers.start, numbers.stop, self._evaluation_group):
            group = range(first, min(first + self._evaluation_group, numbers.stop))
            for stage, number in itertools.product(self.stages, group):  # stages in the order of the model
                if number == group.start and len(self.stages) > 1:
                    self._channels.permit_for("forward", stage.place.index, len(group))
                is_fed = stage.place.is_first or stage.place.is_last or stage.needs_mask
                microbatch = source.get(0, number) if is_fed else None
                x = None if stage.place.is_first else self._channels.recv("forward", stage.place.index)
                y = stage.evaluate(x, microbatch, version=versions[stage.place.index])
                if stage.place.is_last and self.place.reports_loss:
                    total[:2] += torch.stack([y.double(), microbatch.mask_BS.sum().double()])
                elif stage.place.is_last:
                    continue
                else:
                    self._channels.send("forward", stage.place.index, y)
        self._channels.flush()
        total[2] = float(self.runner.stop_requested)
        self._sum_over_ranks(total)
        return total

    def _sum_over_ranks(self, total: Tensor) -> None:
        self.place.group.all_reduce(total)

    def has_finite_masters(self) -> bool:
        """Whether the master weights of all stages on all ranks are finite; the same answer on every rank."""
        broken = torch.zeros(1, device=self.place.device)
        for stage in self.runner.stages.values():
            broken += ~stage.has_finite_master()
        with self._located("the check of the final weights"):
            self._sum_over_ranks(broken)
        return broken.item() == 0

    def _microbatch_for(self, stage: StageCompute, action: Action) -> Microbatch | None:
        """The tokens, where a stage needs them: at the ends, for experts, and to count them if it clips by its norm."""
        if stage.place.is_first or stage.place.is_last or stage.needs_mask or self._schedule.clip == "stage":
            return self._source.get(action.step, action.microbatch)
        return None

    def _version(self, action: Action) -> int:
        return self._schedule.version(stage=action.stage, step=action.step)

    def _forward(self, action: Action) -> None:
        stage = self._stage[action.stage]
        microbatch = self._microbatch_for(stage, action)
        x = None if stage.place.is_first else self._channels.recv("forward", stage.place.index)
        start = perf_counter()
        y = stage.forward((action.step, action.microbatch), x, microbatch, version=self._version(action))
        self.recorder.add(action, start)
        if y is not None:
            self._channels.send("forward", stage.place.index, y)

    def _backward(self, action: Action) -> None:
        stage = self._stage[action.stage]
        grad = None if stage.place.is_last else self._channels.recv("backward", stage.place.index)
        start = perf_counter()
        half = stage.backward if action.op is Op.B else stage.backward_input
        x_grad = half((action.step, action.microbatch), grad, version=self._version(action))
        self.recorder.add(action, start)
        if x_grad is not None:
            self._channels.send("backward", stage.place.index, x_grad)

    def _backward_weight(self, action: Action) -> None:
        start = perf_counter()
        self._stage[action.stage].backward_weight((action.step, action.microbatch))
        self.recorder.add(action, start)

    def _reduce_gradient(self, action: Action) -> None:
        self.runner.submit_gradient(action.stage, action.step, self._stage[action.stage].take_sums(action.step))

    def _sync(self, action: Action) -> None:
        if self.runner.result(action.step).stop:
            self._segment.stop_after(action.step)
