"""From the last backward of a step to its new weight version: reduction, norm, clip, finiteness, optimizer, version.

None of it needs the forwards and backwards that a schedule without a flush goes on with, so by default all of it runs
on a background thread, inside the schedule's slack (docs/method.md). The table submits a stage's gradient (REDUCE_GRAD)
and later waits for the version (STEP); what is computed, and in which order, is the same either way.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter

import torch
from torch import Tensor

from megaasync.distributed import TransportError
from megaasync.distributed.rank_group import RankGroup
from megaasync.observe.trace import Recorder
from megaasync.pipeline import TrainingError
from megaasync.pipeline.background import BackgroundStream
from megaasync.pipeline.stage_update import StageUpdate
from megaasync.pipeline.step_stats import StepResult, StepStats
from megaasync.schedules import Action, Op, Phase, Segment


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """How a run's steps are made, the same on every rank.

    Attributes:
        num_stages: of the model.
        num_microbatches: per step.
        clip_grad_norm: largest gradient norm; None does not clip.
        max_skipped: batches with numbers that are not finite that are left out; the next one ends the run.
        error_feedback: publish weights that look as many updates ahead as the schedule delays them.
        delay_compensation: the optimizer compensates gradients for their delay (Taylor).
        overlap: reduce and step in the background; else where the table says.
        timeout: longest wait for another rank.
    """

    num_stages: int
    num_microbatches: int
    clip_grad_norm: float | None = None
    max_skipped: int = 0
    error_feedback: bool = False
    delay_compensation: bool = False
    overlap: bool = True
    timeout: timedelta = timedelta(minutes=10)


@dataclass(slots=True)
class _Pending:
    """A step on its way: what was submitted, the result to come, and the STEPs in flight in the background."""

    result: Future = field(default_factory=Future)
    submitted: set[int] = field(default_factory=set)
    reductions: list[Future] = field(default_factory=list)  # in the background
    # Per stage, [2 + m] loss sum, valid tokens and losses by microbatch. They belong to the caller's stream: kept until
    # the result is known, or a GPU's allocator would hand their memory out while the background still has to read it.
    sums: dict[int, Tensor] = field(default_factory=dict)
    # Per stage, if each clips by its own norm, for then a STEP may come before the sums over stages are made:
    stats: dict[int, StepStats] = field(default_factory=dict)  # this rank's part of those sums
    own: dict[int, Tensor] = field(default_factory=dict)  # [2] squares and valid tokens of all ranks of the stage
    in_flight: dict[int, Future] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    backward_done_at: float = 0.0
    result_seen: bool = False  # the result was waited for


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A batch whose result is known and whose gradient is not applied on all stages.

    Attributes:
        own: (squares, valid tokens) by stage, if each stage clips by its own norm.
    """

    result: StepResult
    own: dict[int, tuple[float, float]]


class StepRunner:
    """Runs the update halves of one rank's stages.

    Attributes:
        stages: this rank's, by index.
        stop_requested: this rank asks for an end; told to all with the next gradient.
        skipped: batches left out so far, in order; the same on every rank.
    """

    def __init__(
        self,
        stages: Iterable[StageUpdate],
        policy: StepPolicy,
        *,
        norm_group: RankGroup,
        embedding_group: RankGroup | None,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        """The step runner of one rank.

        Args:
            stages: this rank's.
            policy: of the run.
            norm_group: all ranks.
            embedding_group: the first and the last stage's ranks of this pipeline, if they share the embedding.
            device: of the stages.
            recorder: gets start and end of every reduction and step.
        """
        self.stages = {stage.place.index: stage for stage in stages}
        self._policy, self._norm_group, self._embedding_group = policy, norm_group, embedding_group
        ends = {0, policy.num_stages - 1} & set(self.stages)
        self._embedding_stages = [] if embedding_group is None else sorted(ends)
        self.skipped: list[int] = []
        self._device, self._recorder = device, recorder
        self._background = BackgroundStream(device)
        self._pending: dict[int, _Pending] = {}
        self._new_results: list[StepResult] = []
        self._phase: Phase | None = None
        self._segment: Segment | None = None
        self._is_broken = False  # a number was not finite: nothing is applied from there on
        self.stop_requested = False

    def begin(self, phase: Phase, segment: Segment) -> None:
        """A segment of a phase begins; updates that the last one left pending may go under way.

        Nothing is in the background: the last segment waited for all its results and versions.
        """
        self._phase, self._segment = phase, segment
        if not self._policy.overlap or phase.schedule.clip == "stage":
            return
        for step, pending in sorted(self._pending.items()):
            for index in self._most_urgent_first():
                if index not in pending.stepped and segment.has_step_for(index, step):
                    self._start_step(index, step, pending.result.result())

    def submit_gradient(self, index: int, step: int, sums: Tensor) -> None:
        """REDUCE_GRAD: a stage's gradient sum is complete. Nobody waits.

        Args:
            index: of the stage.
            step: of the batch.
            sums: [2 + m] as `StageCompute.take_sums`.
        """
        pending = self._pending.setdefault(step, _Pending())
        pending.submitted.add(index)
        pending.sums[index] = sums
        if self._phase.schedule.clip == "stage":
            self._reduce(index, step, beside=False)
            stats = pending.stats[index] = self._stats_of(index, step, pending)
            pending.own[index] = torch.stack([stats.squares, sums[1]])
            self.stages[index].sum_over_replicas(pending.own[index])
        elif self._policy.overlap:
            pending.reductions.append(self._background.submit(lambda: self._reduce(index, step, beside=True)))
        else:
            self._reduce(index, step, beside=False)
        if len(pending.submitted) == len(self.stages):
            pending.backward_done_at = perf_counter()
            stop = self.stop_requested
            self._background.submit(lambda: self._finalize(step, pending, stop=stop))

    def _reduce(self, index: int, step: int, *, beside: bool) -> None:
        start = perf_counter()
        self.stages[index].reduce(step)
        self._recorder.add(Action(Op.REDUCE_GRAD, index, step), start, beside=beside)

    def _finalize(self, step: int, pending: _Pending, *, stop: bool) -> None:
        """In the background: sum what couples the stages, tell the result, and step what is due."""
        try:
            for reduction in pending.reductions:  # all done; one that failed must not be summed
                reduction.result()
            result = self._all_reduce_stats(step, pending, stop=stop)
        except BaseException as error:
            pending.result.set_exception(error)
            return
        if result.stop:
            self._segment.stop_after(step)
        if not result.is_finite:
            self.skipped.append(step)
            self._is_broken = self._is_broken or len(self.skipped) > self._policy.max_skipped
        steps_here = self._policy.overlap and self._phase.schedule.clip == "global" and not self._is_broken
        due = [index for index in self._most_urgent_first() if steps_here and self._segment.has_step_for(index, step)]
        pending.in_flight = {index: Future() for index in due}
        pending.result.set_result(result)
        for index in due:
            self._step_for(pending.in_flight[index], index, step, result)

    def _most_urgent_first(self) -> list[int]:
        """Stages in the order of their delay: the table waits first for those that have none."""
        return sorted(self.stages, key=lambda index: (self._phase.schedule.delay[index], index))

    def _all_reduce_stats(self, step: int, pending: _Pending, *, stop: bool) -> StepResult:
        self._sum_tied_gradients(step)
        total = self._no_stats()
        for index in self.stages:
            total.add(pending.stats[index] if index in pending.stats else self._stats_of(index, step, pending))
        total.set_stop(stop)
        self._norm_group.all_reduce(total.vector)
        return total.result(step, backward_done_at=pending.backward_done_at)

    def _no_stats(self) -> StepStats:
        return StepStats(
            num_stages=self._policy.num_stages,
            num_microbatches=self._policy.num_microbatches,
            device=self._device,
        )

    def _stats_of(self, index: int, step: int, pending: _Pending) -> StepStats:
        """One stage's part, on this rank, of what is summed over all."""
        stage, stats = self.stages[index], self._no_stats()
        sums = pending.sums[index] if stage.place.is_last else None
        stats.set_stage(index, stage.squares(step), sums=sums, routing=stage.routing_stats(step))
        return stats

    def _sum_tied_gradients(self, step: int) -> None:
        """Make the tied embedding's gradient the sum of the first and the last stage's, on both."""
        if len(self._embedding_stages) == 2:
            first, last = (self.stages[index].tied_gradient(step) for index in self._embedding_stages)
            first.add_(last)
            last.copy_(first)
        elif self._embedding_stages:
            self._embedding_group.all_reduce(self.stages[self._embedding_stages[0]].tied_gradient(step))

    def _start_step(self, index: int, step: int, result: StepResult) -> None:
        future = Future()
        self._pending[step].in_flight[index] = future
        self._background.submit(lambda: self._step_for(future, index, step, result))

    def _step_for(self, future: Future, index: int, step: int, result: StepResult) -> None:
        """In the background: step, and tell the future."""
        try:
            self._apply(index, step, result, beside=True)
            future.set_result(self._background.record_event())
        except BaseException as error:
            future.set_exception(error)

    def _scale(self, result: StepResult) -> float:
        """Factor from the gradient sum to the clipped mean."""
        clip = self._policy.clip_grad_norm
        clipped = 1.0 if clip is None else min(1.0, clip / max(result.grad_norm, 1e-30))
        return clipped / max(result.tokens, 1)

    def _apply(self, index: int, step: int, result: StepResult, *, beside: bool) -> None:
        start = perf_counter()
        if not result.is_finite:
            self.stages[index].skip(step)
            self._recorder.add(Action(Op.STEP, index, step), start, beside=beside)
            return
        scale = self._scale(result)
        lookahead = self._phase.lookahead_steps(stage=index, step=step) if self._policy.error_feedback else 0
        extra = (
            {"grad_version": self._phase.schedule.version(stage=index, step=step)}
            if self._policy.delay_compensation
            else {}
        )
        self.stages[index].step(step, scale=scale, lookahead_steps=lookahead, **extra)
        self._recorder.add(Action(Op.STEP, index, step), start, beside=beside)

    def result(self, step: int) -> StepResult:
        """SYNC: wait for loss, norm and stop of a step; the first call reports it and checks that it is finite.

        Raises:
            TrainingError: a number is not finite; every rank raises in the same step.
            TransportError: a rank did not submit its part.
        """
        pending = self._pending[step]
        try:
            # the background's own waits, for the tied embedding and for the norm, end first and say more
            result: StepResult = pending.result.result(2 * self._policy.timeout.total_seconds() + 5)
        except FutureTimeoutError:  # the built-in one only from Python 3.11
            raise TransportError(f"no answer came for {2 * self._policy.timeout.total_seconds():g} s") from None
        if not pending.result_seen:
            pending.result_seen = True
            self._new_results.append(result)
        if not result.is_finite and self.skipped.index(step) >= self._policy.max_skipped:
            before = len(self.skipped) - 1 if self._policy.max_skipped else None
            clips_globally = self._phase.schedule.clip == "global"
            raise TrainingError(result.explain(clips_globally=clips_globally, skipped_before=before))
        return result

    def pending_steps(self) -> dict[int, PendingStep]:
        """Batches whose gradients wait for a STEP of a later segment, for a checkpoint; the pipeline is empty."""
        return {
            step: PendingStep(
                pending.result.result(),
                {index: tuple(own.tolist()) for index, own in pending.own.items()},
            )
            for step, pending in sorted(self._pending.items())
        }

    def restore_pending(self, step: int, known: PendingStep) -> None:
        """A pending batch from a checkpoint; its gradient sums are in their buffers already."""
        pending = self._pending[step] = _Pending(submitted=set(self.stages), result_seen=True)
        pending.result.set_result(known.result)
        pending.own = {
            index: torch.tensor(known.own[index], dtype=torch.float64, device=self._device)
            for index in self.stages
            if index in known.own
        }
        pending.stepped = {index for index, stage in self.stages.items() if stage.num_updates > step}

    def scale_of(self, known: PendingStep) -> float:
        """Factor from the gradient sum of a pending batch to the clipped mean, of the global norm."""
        return self._scale(known.result)

    def take_new_results(self) -> list[StepResult]:
        """Results that became known since the last call, in order."""
        new, self._new_results = self._new_results, []
        return new

    def wait_for_results(self) -> None:
        """Wait for all results of submitted steps."""
        for step in sorted(self._pending):
            self.result(step)
        self._forget_applied()

    def step(self, action: Action) -> None:
        """STEP: have the update of a step made, and its version ready for this rank's next forward.

        Raises:
            TrainingError, TransportError: as `result`.
        """
        index, step = action.stage, action.step
        pending = self._pending[step]
        if self._phase.schedule.clip == "stage":
            self._step_by_own_norm(index, step, pending)
        else:
            result = self.result(step)
            if not self._policy.overlap:
                self._apply(index, step, result, beside=False)
            else:
                if index not in pending.in_flight:
                    self._start_step(index, step, result)
                self._background.wait_event(pending.in_flight[index].result())
        pending.stepped.add(index)
        self._forget_applied()

    def _step_by_own_norm(self, index: int, step: int, pending: _Pending) -> None:
        """Clip by the stage's own norm. A gradient that is not finite is left out, before SYNC tells of it."""
        squares, tokens = pending.own[index].tolist()
        norm = squares**0.5 / max(tokens, 1)
        self._apply(index, step, StepResult(step, 0.0, norm, int(tokens), 0.0, False), beside=False)

    def close(self) -> None:
        """End the background thread; nothing may be submitted after."""
        self._background.close()

    def _forget_applied(self) -> None:
        for step in [s for s, p in self._pending.items() if p.result_seen and len(p.stepped) == len(self.stages)]:
            del self._pending[step]
