"""The one executor: runs this rank's slice of a schedule's table, whatever the schedule. There is no `if async`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch import distributed as dist

from megaasync.data.microbatches import MicrobatchSource
from megaasync.distributed.p2p import Receiver, Sender, TensorSpec
from megaasync.observe.trace import Recorder
from megaasync.pipeline import TrainingError
from megaasync.pipeline.stage import PipelineStage
from megaasync.schedules import Action, Op, PipelineSchedule, unroll

_EVALUATION_SLICE = 32  # microbatches between two looks at whether to stop


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one batch gave, the same on every rank.

    Attributes:
        step: 0-based batch number.
        loss: mean over the global batch's valid tokens, in nats.
        grad_norm: global, before clipping.
        tokens: valid tokens of the batch.
        finished: time at which this rank's last backward of the batch was done, seconds of `perf_counter`.
        stop: some rank asked to stop.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    finished: float
    stop: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss in nats over the valid tokens of an evaluation, and whether some rank asked to stop."""

    loss: float | None
    stop: bool


@dataclass(slots=True)
class _PendingNorm:
    """A global norm under way: this rank's terms, the reduction's handle, and when the batch was finished here."""

    terms: Tensor
    work: dist.Work | None
    finished: float


class Executor:
    """Runs segments of a schedule on one rank.

    Attributes:
        num_updates: STEPs made on every stage.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: list[PipelineStage],
        source: MicrobatchSource,
        *,
        rank: int,
        spec: TensorSpec,
        groups: dict[str, dist.ProcessGroup | None],
        clip_grad_norm: float | None,
        max_outstanding: int,
        recorder: Recorder,
    ) -> None:
        """Put the executor of one rank together.

        Args:
            schedule: the tables.
            stages: this rank's.
            source: training microbatches by address.
            rank: on the pipeline axis.
            spec: of every activation and activation gradient.
            groups: "forward", "backward" and "norm": a process group each, or None for a single rank.
            clip_grad_norm: largest global gradient norm, or None.
            max_outstanding: sends per channel that need not have gone out.
            recorder: gets start and end of every action.
        """
        self._schedule, self._source, self._rank, self._spec = schedule, source, rank, spec
        self._stages = {stage.index: stage for stage in stages}
        self._clip = clip_grad_norm
        self._norm_group = groups["norm"]
        self._norms: dict[int, _PendingNorm] = {}
        self._results: dict[int, StepResult] = {}
        self._reported: list[StepResult] = []
        self._run = {Op.F: self._forward, Op.B: self._backward, Op.NORM: self._norm, Op.STEP: self._step}
        self._end = 0
        self._stop_requested = False
        self.num_updates = 0
        self._recorder = recorder
        last = schedule.num_stages - 1
        owner = schedule.rank_of_stage
        # channels by the stage whose input (forward) or output gradient (backward) they bring
        self._receive_x = {s: Receiver(owner[s - 1], spec, groups["forward"]) for s in self._stages if s > 0}
        self._receive_grad = {s: Receiver(owner[s + 1], spec, groups["backward"]) for s in self._stages if s < last}
        self._send_y = {
            s: Sender(owner[s + 1], spec, groups["forward"], max_outstanding=max_outstanding)
            for s in self._stages
            if s < last
        }
        self._send_grad = {
            s: Sender(owner[s - 1], spec, groups["backward"], max_outstanding=max_outstanding)
            for s in self._stages
            if s > 0
        }

    @property
    def stages(self) -> list[PipelineStage]:
        """This rank's stages."""
        return list(self._stages.values())

    def request_stop(self) -> None:
        """Ask for an end: all ranks hear of it with the next global norm and end after the same step."""
        self._stop_requested = True

    def run(self, first_step: int, end_step: int, *, settle: bool = False) -> Iterator[StepResult]:
        """Run the steps [first_step, end_step) from an empty pipeline to an empty pipeline.

        Gradients that the delay leaves pending stay pending unless `settle`. With first_step == end_step and `settle`
        only those are applied.

        Yields:
            One result per batch, in order, as soon as its global norm is known here.

        Raises:
            TrainingError: a loss or gradient is not finite; every rank raises in the same step.
        """
        self._end = end_step
        self._expect((end_step - first_step) * self._schedule.num_microbatches)
        actions = unroll(
            self._schedule,
            rank=self._rank,
            first_step=first_step,
            end_step=lambda: self._end,
            num_updates=self.num_updates,
            settle=settle,
        )
        try:
            for action in actions:
                self._run_noted(action)
                yield from self._take_reported()
            for step in sorted(self._norms):
                self._result(step)
                yield from self._take_reported()
        except TrainingError:
            yield from self._take_reported()
            self._flush()
            raise
        self._close((end_step - self._end) * self._schedule.num_microbatches)

    def _run_noted(self, action: Action) -> None:
        """Run one action; an error in it tells where in the table it was."""
        try:
            self._run[action.op](action)
        except TrainingError:
            raise
        except Exception as error:
            note = f"rank {self._rank} was at {action} of schedule {self._schedule.name}"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]  # add_note is new in Python 3.11
            raise

    def evaluate(self, source: MicrobatchSource, *, num_microbatches: int, version: int) -> Evaluation:
        """Mean loss over a source's microbatches, forward only, with an empty pipeline; the same on every rank.

        A stop that some rank asks for is heeded between slices of microbatches; the loss is then None.

        Args:
            source: addressed as (0, microbatch).
            num_microbatches: how many.
            version: weight version to use on every stage.
        """
        total = torch.zeros(3, dtype=torch.float64, device=self._spec.device)
        for first in range(0, num_microbatches, _EVALUATION_SLICE):
            numbers = range(first, min(first + _EVALUATION_SLICE, num_microbatches))
            total += self._evaluate_slice(source, numbers, version=version)
            if total[2] > 0:
                return Evaluation(None, True)
        return Evaluation((total[0] / total[1].clamp_min(1)).item(), False)

    def _evaluate_slice(self, source: MicrobatchSource, numbers: range, *, version: int) -> Tensor:
        """[3] float64 over all ranks: loss sum, valid tokens, ranks that asked to stop."""
        for receiver in self._receive_x.values():
            receiver.expect(len(numbers))
        total = torch.zeros(3, dtype=torch.float64, device=self._spec.device)
        for number in numbers:
            for stage in self._stages.values():
                microbatch = source.get(0, number) if stage.is_first or stage.is_last else None
                x = None if stage.is_first else self._receive_x[stage.index].take()
                y = stage.evaluate(x, microbatch, version=version)
                if stage.is_last:
                    total[:2] += torch.stack([y.double(), microbatch.mask_BS.sum().double()])
                else:
                    self._send_y[stage.index].send(y)
        for sender in self._send_y.values():
            sender.flush()
        total[2] = float(self._stop_requested)
        if self._norm_group is not None:
            dist.all_reduce(total, group=self._norm_group)
        return total

    def has_finite_masters(self) -> bool:
        """Whether the master weights of all stages on all ranks are finite; the same answer on every rank."""
        broken = torch.zeros(1, device=self._spec.device)
        for stage in self._stages.values():
            broken += (~stage.optimizer.master.isfinite()).any()
        if self._norm_group is not None:
            dist.all_reduce(broken, group=self._norm_group)
        return broken.item() == 0

    def _expect(self, num_messages: int) -> None:
        for receiver in (*self._receive_x.values(), *self._receive_grad.values()):
            receiver.expect(num_messages)

    def _close(self, num_unsent: int) -> None:
        """Leave no message and no receive behind; `num_unsent` messages per channel were cut off by a stop."""
        for sender in (*self._send_y.values(), *self._send_grad.values()):
            sender.pad(num_unsent)
        for receiver in (*self._receive_x.values(), *self._receive_grad.values()):
            receiver.cancel()
        self._flush()

    def _flush(self) -> None:
        """Wait until all messages have gone out: peers need them to come to the step at which this rank ends."""
        for sender in (*self._send_y.values(), *self._send_grad.values()):
            sender.flush()

    def _take_reported(self) -> Iterator[StepResult]:
        reported, self._reported = self._reported, []
        yield from reported

    def _forward(self, action: Action) -> None:
        stage = self._stages[action.stage]
        needs_tokens = stage.is_first or stage.is_last
        microbatch = self._source.get(action.step, action.microbatch) if needs_tokens else None
        x = None if stage.is_first else self._receive_x[action.stage].take()
        start = perf_counter()
        version = self._schedule.version(stage=action.stage, step=action.step)
        y = stage.forward((action.step, action.microbatch), x, microbatch, version=version)
        self._recorder.add(action, start)
        if y is not None:
            self._send_y[action.stage].send(y)

    def _backward(self, action: Action) -> None:
        stage = self._stages[action.stage]
        grad = None if stage.is_last else self._receive_grad[action.stage].take()
        start = perf_counter()
        version = self._schedule.version(stage=action.stage, step=action.step)
        x_grad = stage.backward((action.step, action.microbatch), grad, version=version)
        self._recorder.add(action, start)
        if x_grad is not None:
            self._send_grad[action.stage].send(x_grad)

    def _norm(self, action: Action) -> None:
        """Hand in this stage's terms; with the last of this rank's stages the reduction starts, and nobody waits."""
        terms = self._stages[action.stage].norm_terms(action.step)
        pending = self._norms.setdefault(action.step, _PendingNorm(terms.new_zeros(4), None, 0.0))
        pending.terms[:3] += terms
        if action.stage == max(self._stages):
            pending.terms[3] = float(self._stop_requested)
            pending.finished = perf_counter()
            if self._norm_group is not None:
                pending.work = dist.all_reduce(pending.terms, group=self._norm_group, async_op=True)

    def _result(self, step: int) -> StepResult:
        """Wait for the global norm of a step; the first call reports it and checks that it is finite."""
        pending = self._norms.pop(step, None)
        if pending is None:
            return self._results[step]
        if pending.work is not None:
            pending.work.wait()
        squares, loss_sum, tokens, stops = pending.terms.tolist()
        tokens_or_one = max(tokens, 1.0)
        result = StepResult(
            step, loss_sum / tokens_or_one, squares**0.5 / tokens_or_one, int(tokens), pending.finished, stops > 0
        )
        self._results[step] = result
        self._reported.append(result)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise TrainingError(
                f"step {step + 1}: loss {result.loss} and global gradient norm {result.grad_norm} are not both finite; "
                "nothing of this step was applied. Try a lower optimizer.lr or a longer train.warmup_steps"
            )
        return result

    def _step(self, action: Action) -> None:
        result = self._result(action.step)
        start = perf_counter()
        clipped = 1.0 if self._clip is None else min(1.0, self._clip / max(result.grad_norm, 1e-30))
        self._stages[action.stage].step(action.step, scale=clipped / max(result.tokens, 1))
        self._recorder.add(action, start)
        if action.stage == max(self._stages):
            self._results.pop(action.step)
            self.num_updates = action.step + 1
        if result.stop:
            # No rank has begun the step that needs this update on its most delayed stage: all can end before it.
            self._end = min(self._end, action.step + 1 + max(self._schedule.delay))
