"""From the last backward of a step to its new weight version: reduction, norm, clip, finiteness, optimizer, version.

None of it needs the forwards and backwards that a schedule without a flush goes on with, so by default all of it runs
on a background thread, inside the schedule's slack (METHOD.md section 2). The table hands a stage's gradient in (NORM)
and later waits for the version (STEP); what is computed, and in which order, is the same either way.
"""

import math
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
from megaasync.optim.expert_balance import NUM_FIGURES
from megaasync.pipeline import TrainingError
from megaasync.pipeline.background import Background
from megaasync.pipeline.stage import PipelineStage
from megaasync.schedules import Action, Op, Phase

# squares, loss sum, tokens, stops; then of the routers: largest loads, layers, three losses
NUM_TERMS = 4 + NUM_FIGURES


def num_terms(*, num_stages: int, num_microbatches: int) -> int:
    """Numbers that are summed over all ranks for each step: `NUM_TERMS`, and what is not finite, by place."""
    return NUM_TERMS + num_stages + num_microbatches


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
        expert_load: tokens of the busiest expert over the mean, mean over the layers with experts; None without any.
        routing_losses: the routers' losses, per valid token, in the order of `megaasync.nn.router.LOSSES`.
        broken_stages: those whose gradient is not finite.
        broken_microbatches: those whose loss is not finite, on any data-parallel rank; 0-based.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    finished: float
    stop: bool
    expert_load: float | None = None
    routing_losses: tuple[float, ...] = ()
    broken_stages: tuple[int, ...] = ()
    broken_microbatches: tuple[int, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether loss and norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(slots=True)
class _Pending:
    """A step on its way: what was handed in, the result to come, and the STEPs under way in the background."""

    result: Future = field(default_factory=Future)
    handed_in: set[int] = field(default_factory=set)
    reductions: list[Future] = field(default_factory=list)  # in the background
    # Per stage, [2 + m] loss sum, valid tokens and losses by microbatch. They belong to the caller's stream: kept until
    # the result is known, or a GPU's allocator would hand their memory out while the background still has to read it.
    sums: dict[int, Tensor] = field(default_factory=dict)
    # Per stage, if each clips by its own norm, for then a STEP may come before the sums over stages are made:
    terms: dict[int, Tensor] = field(default_factory=dict)  # this rank's part of those sums
    own: dict[int, Tensor] = field(default_factory=dict)  # [2] squares and valid tokens of all ranks of the stage
    under_way: dict[int, Future] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    finished: float = 0.0
    is_known: bool = False  # the result was waited for


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A batch whose result is known and whose gradient is not applied on all stages.

    Attributes:
        own: (squares, valid tokens) by stage, if each stage clips by its own norm.
    """

    result: StepResult
    own: dict[int, tuple[float, float]]


class Updates:
    """The updates of one rank's stages.

    Attributes:
        stop_requested: this rank asks for an end; told to all with the next hand-in.
        skipped: batches left out so far, in order; the same on every rank.
    """

    def __init__(
        self,
        stages: Iterable[PipelineStage],
        *,
        num_stages: int,
        num_microbatches: int,
        clip_grad_norm: float | None,
        max_skipped: int,
        norm: RankGroup,
        ends: RankGroup | None,
        looks_ahead: bool,
        compensates: bool,
        overlap: bool,
        device: torch.device,
        timeout: timedelta,
        recorder: Recorder,
    ) -> None:
        """The updates of one rank.

        Args:
            stages: this rank's.
            num_stages: of the model.
            num_microbatches: per step.
            clip_grad_norm: largest gradient norm, or None.
            max_skipped: batches with numbers that are not finite that are left out; the next one ends the run.
            norm: all ranks.
            ends: the first and the last stage's ranks of this pipeline, if they share the embedding; else None.
            looks_ahead: publish weights that look as many updates ahead as the schedule delays them (error feedback).
            compensates: the optimizer compensates gradients for their delay (Taylor).
            overlap: reduce and step in the background; else where the table says.
            device: of the stages.
            timeout: longest wait for another rank.
            recorder: gets start and end of every reduction and step.
        """
        self._stages = {stage.index: stage for stage in stages}
        self._ends = [] if ends is None else sorted({0, num_stages - 1} & set(self._stages))
        self._clip, self._norm, self._tied = clip_grad_norm, norm, ends
        self._num_stages, self._num_microbatches, self._max_skipped = num_stages, num_microbatches, max_skipped
        self.skipped: list[int] = []
        self._looks_ahead, self._compensates, self._overlap = looks_ahead, compensates, overlap
        self._device, self._timeout, self._recorder = device, timeout, recorder
        self._background = Background(device)
        self._pending: dict[int, _Pending] = {}
        self._new_results: list[StepResult] = []
        self._phase: Phase | None = None
        self._end = 0
        self._is_broken = False  # a number was not finite: nothing is applied from there on
        self.stop_requested = False

    def begin(self, phase: Phase, end_step: int) -> None:
        """A segment of a phase begins; updates that the last one left pending may go under way.

        Nothing is in the background: the last segment waited for all its results and versions.
        """
        self._phase, self._end = phase, end_step
        if not self._overlap or phase.schedule.clip == "stage":
            return
        for step, pending in sorted(self._pending.items()):
            for index in self._most_urgent_first():
                if index not in pending.stepped and self._is_due(index, step):
                    self._put_under_way(index, step, pending.result.result())

    def _is_due(self, index: int, step: int) -> bool:
        """Whether the segment has a STEP for it; the last gradients stay pending until a later one."""
        return step + self._phase.schedule.delay[index] < self._end

    def hand_in(self, action: Action) -> None:
        """NORM: a stage's gradient sum is complete. Nobody waits."""
        index, step = action.stage, action.step
        pending = self._pending.setdefault(step, _Pending())
        pending.handed_in.add(index)
        pending.sums[index] = self._stages[index].take_sums(step)
        if self._phase.schedule.clip == "stage":
            self._reduce(index, step, beside=False)
            terms = pending.terms[index] = self._terms_of(index, step, pending)
            pending.own[index] = torch.stack([terms[0], pending.sums[index][1]])
            self._stages[index].sum_over_replicas(pending.own[index])
        elif self._overlap:
            pending.reductions.append(self._background.submit(lambda: self._reduce(index, step, beside=True)))
        else:
            self._reduce(index, step, beside=False)
        if len(pending.handed_in) == len(self._stages):
            pending.finished = perf_counter()
            stop = self.stop_requested
            self._background.submit(lambda: self._conclude(step, pending, stop=stop))

    def _reduce(self, index: int, step: int, *, beside: bool) -> None:
        start = perf_counter()
        self._stages[index].reduce(step)
        self._recorder.add(Action(Op.NORM, index, step), start, beside=beside)

    def _conclude(self, step: int, pending: _Pending, *, stop: bool) -> None:
        """In the background: sum what couples the stages, tell the result, and step what is due."""
        try:
            for reduction in pending.reductions:  # all done; one that failed must not be summed
                reduction.result()
            result = self._couple(step, pending, stop=stop)
        except BaseException as error:
            pending.result.set_exception(error)
            return
        if result.stop:
            # No rank has begun the step that needs this update on its most delayed stage: all can end before it.
            self._end = min(self._end, step + 1 + max(self._phase.schedule.delay))
        if not result.is_finite:
            self.skipped.append(step)
            self._is_broken = self._is_broken or len(self.skipped) > self._max_skipped
        steps_here = self._overlap and self._phase.schedule.clip == "global" and not self._is_broken
        due = [index for index in self._most_urgent_first() if steps_here and self._is_due(index, step)]
        pending.under_way = {index: Future() for index in due}
        pending.result.set_result(result)
        for index in due:
            self._step_for(pending.under_way[index], index, step, result)

    def _most_urgent_first(self) -> list[int]:
        """Stages in the order of their delay: the table waits first for those that have none."""
        return sorted(self._stages, key=lambda index: (self._phase.schedule.delay[index], index))

    def _couple(self, step: int, pending: _Pending, *, stop: bool) -> StepResult:
        self._tie(step)
        terms = self._no_terms()
        for index in self._stages:
            terms += pending.terms[index] if index in pending.terms else self._terms_of(index, step, pending)
        terms[3] = float(stop)
        self._norm.all_reduce(terms)
        numbers = terms.tolist()
        squares, loss_sum, tokens, stops, largest, layers, *losses = numbers[:NUM_TERMS]
        broken = numbers[NUM_TERMS:]
        divisor = max(tokens, 1.0)
        return StepResult(
            step,
            loss_sum / divisor,
            squares**0.5 / divisor,
            int(tokens),
            pending.finished,
            stops > 0,
            largest / layers if layers else None,
            tuple(loss / divisor for loss in losses) if layers else (),
            tuple(index for index in range(self._num_stages) if broken[index]),
            tuple(number for number in range(self._num_microbatches) if broken[self._num_stages + number]),
        )

    def _no_terms(self) -> Tensor:
        """Zeros: `NUM_TERMS`, then a number for every stage and every microbatch that counts what is not finite."""
        length = num_terms(num_stages=self._num_stages, num_microbatches=self._num_microbatches)
        return torch.zeros(length, dtype=torch.float64, device=self._device)

    def _terms_of(self, index: int, step: int, pending: _Pending) -> Tensor:
        """One stage's part, on this rank, of what is summed over all."""
        stage = self._stages[index]
        terms, sums = self._no_terms(), pending.sums[index]
        terms[0] = stage.squares(step)
        terms[NUM_TERMS + index] = ~terms[0].isfinite()
        if stage.is_last:
            terms[1:3] = sums[:2]
            first = NUM_TERMS + self._num_stages
            terms[first : first + len(sums) - 2] = ~sums[2:].isfinite()
        if (figures := stage.routing_figures(step)) is not None:
            terms[4:NUM_TERMS] = figures
        return terms

    def _tie(self, step: int) -> None:
        """Make the tied embedding's gradient the sum of the first and the last stage's, on both."""
        if len(self._ends) == 2:
            first, last = (self._stages[index].tied_gradient(step) for index in self._ends)
            first.add_(last)
            last.copy_(first)
        elif self._ends:
            self._tied.all_reduce(self._stages[self._ends[0]].tied_gradient(step))

    def _put_under_way(self, index: int, step: int, result: StepResult) -> None:
        future = Future()
        self._pending[step].under_way[index] = future
        self._background.submit(lambda: self._step_for(future, index, step, result))

    def _step_for(self, future: Future, index: int, step: int, result: StepResult) -> None:
        """In the background: step, and tell the future."""
        try:
            self._apply(index, step, result, beside=True)
            future.set_result(self._background.mark())
        except BaseException as error:
            future.set_exception(error)

    def _scale(self, result: StepResult) -> float:
        """Factor from the gradient sum to the clipped mean."""
        clipped = 1.0 if self._clip is None else min(1.0, self._clip / max(result.grad_norm, 1e-30))
        return clipped / max(result.tokens, 1)

    def _apply(self, index: int, step: int, result: StepResult, *, beside: bool) -> None:
        start = perf_counter()
        if not result.is_finite:
            self._stages[index].skip(step)
            self._recorder.add(Action(Op.STEP, index, step), start, beside=beside)
            return
        scale = self._scale(result)
        ahead = self._phase.steps_ahead(stage=index, step=step) if self._looks_ahead else 0
        extra = {"taken_at": self._phase.schedule.version(stage=index, step=step)} if self._compensates else {}
        self._stages[index].step(step, scale=scale, ahead=ahead, **extra)
        self._recorder.add(Action(Op.STEP, index, step), start, beside=beside)

    def result(self, step: int) -> StepResult:
        """RESULT: wait for loss, norm and stop of a step; the first call reports it and checks that it is finite.

        Raises:
            TrainingError: a number is not finite; every rank raises in the same step.
            TransportError: a rank did not hand in.
        """
        pending = self._pending[step]
        try:
            # the background's own waits, for the tied embedding and for the norm, end first and say more
            result: StepResult = pending.result.result(2 * self._timeout.total_seconds() + 5)
        except FutureTimeoutError:  # the built-in one only from Python 3.11
            raise TransportError(f"no answer came for {2 * self._timeout.total_seconds():g} s") from None
        if not pending.is_known:
            pending.is_known = True
            self._new_results.append(result)
        if not result.is_finite and self.skipped.index(step) >= self._max_skipped:
            raise TrainingError(self._explained(step, result))
        return result

    def _explained(self, step: int, result: StepResult) -> str:
        """What is not finite, where, and what to do."""
        where = []
        if result.broken_microbatches:
            where.append(f"losses of microbatches {', '.join(str(n + 1) for n in result.broken_microbatches)}")
        if result.broken_stages:
            where.append(f"gradients of stages {', '.join(map(str, result.broken_stages))}")
        clip = self._phase.schedule.clip
        applied = "nothing of this step was applied" if clip == "global" else "stages with such a gradient left it out"
        skipped = ""
        if self._max_skipped:
            skipped = f"; {len(self.skipped) - 1} batches were skipped before, as train.max_skipped allows"
        return (
            f"step {step + 1}: loss {result.loss} and global gradient norm {result.grad_norm} are not both finite "
            f"({'; '.join(where)}); {applied}{skipped}. Try a lower optimizer.lr or a longer train.warmup_steps"
        )

    def pending_steps(self) -> dict[int, PendingStep]:
        """Batches whose gradients wait for a STEP of a later segment, for a checkpoint; the pipeline is empty."""
        return {
            step: PendingStep(
                pending.result.result(),
                {index: tuple(own.tolist()) for index, own in pending.own.items()},
            )
            for step, pending in sorted(self._pending.items())
        }

    def bring_back(self, step: int, known: PendingStep) -> None:
        """A pending batch from a checkpoint; its gradient sums are in their buffers already."""
        pending = self._pending[step] = _Pending(handed_in=set(self._stages), is_known=True)
        pending.result.set_result(known.result)
        pending.own = {
            index: torch.tensor(known.own[index], dtype=torch.float64, device=self._device)
            for index in self._stages
            if index in known.own
        }
        pending.stepped = {index for index, stage in self._stages.items() if stage.num_updates > step}

    def scale_of(self, known: PendingStep) -> float:
        """Factor from the gradient sum of a pending batch to the clipped mean, of the global norm."""
        return self._scale(known.result)

    def take_new_results(self) -> list[StepResult]:
        """Results that became known since the last call, in order."""
        new, self._new_results = self._new_results, []
        return new

    def wait_for_results(self) -> None:
        """Wait for all results of steps handed in."""
        for step in sorted(self._pending):
            self.result(step)
        self._forget_finished()

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
            if not self._overlap:
                self._apply(index, step, result, beside=False)
            else:
                if index not in pending.under_way:
                    self._put_under_way(index, step, result)
                self._background.join(pending.under_way[index].result())
        pending.stepped.add(index)
        self._forget_finished()

    def _step_by_own_norm(self, index: int, step: int, pending: _Pending) -> None:
        """Clip by the stage's own norm. A gradient that is not finite is left out, before RESULT tells of it."""
        squares, tokens = pending.own[index].tolist()
        norm = squares**0.5 / max(tokens, 1)
        self._apply(index, step, StepResult(step, 0.0, norm, int(tokens), 0.0, False), beside=False)

    def close(self) -> None:
        """End the background thread; nothing may be handed in after."""
        self._background.close()

    def _forget_finished(self) -> None:
        for step in [s for s, p in self._pending.items() if p.is_known and len(p.stepped) == len(self._stages)]:
            del self._pending[step]
