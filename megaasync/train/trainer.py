"""The loop: segments of steps between evaluations, then the flush, then the final evaluation."""

import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import distributed as dist

from megaasync.config.schema import Config
from megaasync.nn.router import LOSSES
from megaasync.observe.trace import Timeline, merge
from megaasync.optim.lr_schedule import LrShape, lr_multiplier
from megaasync.pipeline import TrainingError
from megaasync.pipeline.evaluation import Evaluator, ValidationLosses
from megaasync.pipeline.executor import Executor
from megaasync.pipeline.step_stats import StepResult
from megaasync.schedules import Phase
from megaasync.train.checkpointing import CheckpointManager

_PATIENCE_SECONDS = 3600.0  # with what hangs on disks


class Observer(Protocol):
    """Whoever wants to see rows as they are made; on rank 0."""

    def on_row(self, row: dict[str, Any]) -> None:
        """A train or val row of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """What a run came to.

    Attributes:
        status: completed or interrupted.
        steps: steps done.
        tokens: valid tokens seen.
        train_loss: of the last step.
        val_loss: of z after the flush; None if interrupted or without validation data.
        tokens_per_second: between the first and the last step, evaluations left out.
        peak_memory_bytes: of the rank that used most; on ranks other than 0, this rank's.
        timeline: measured, all ranks; on ranks other than 0, this rank's.
        requeue: it was interrupted by what wants it to be started again by itself, and a checkpoint holds what it
            has done.
        saved_step: of the newest checkpoint that the run has on disk; None without one.
        save_problem: why the last save failed; None if it did not.
        device_name: of this rank's device.
    """

    status: str
    steps: int
    tokens: int
    train_loss: float | None
    val_loss: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int
    timeline: Timeline
    requeue: bool
    saved_step: int | None
    save_problem: str | None
    device_name: str


def _now() -> str:
    """UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _peak_memory() -> int:
    """Bytes: of the GPU if there is one, else resident in the process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Trainer:
    """Runs a configured training on one rank; all ranks run the same trainer.

    Attributes:
        kernels: name of the backend that layers compute with.
    """

    def __init__(
        self,
        config: Config,
        phases: tuple[Phase, ...],
        executor: Executor,
        evaluator: Evaluator,
        *,
        observer: Observer | None = None,
        checkpoints: CheckpointManager | None = None,
        began: float | None = None,
        kernels: str = "torch",
    ) -> None:
        """A trainer of what `megaasync.train.build` has put together; `kernels` is the name of the backend."""
        self.kernels = kernels
        self._started = perf_counter() if began is None else began
        self._checkpoints = checkpoints
        self._config, self._phases, self.executor = config, phases, executor
        self._evaluator, self._observer = evaluator, observer
        self._tokens, self._last_loss = 0, None
        self._finish_times: list[float] = []  # first and newest, evaluations taken out
        self._evaluating = 0.0
        self._began = perf_counter()
        self._slowest_step = self._longest_evaluation = 0.0
        self._start, self._tokens_before = 0, 0
        self._requeue = False
        if checkpoints is not None and checkpoints.position is not None:
            position = checkpoints.position
            self._phases, self._start = position.phases, position.step
            self._tokens = self._tokens_before = position.tokens
            self._last_loss = position.train_loss

    @property
    def start(self) -> int:
        """Steps that were done before this start."""
        return self._start

    @property
    def has_validation(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self._evaluator.has_data

    def request_stop(self, *, requeue: bool = False) -> None:
        """End after the step that all ranks agree on; `requeue` if the run is to be started again by itself."""
        self._requeue |= requeue
        self.executor.request_stop()

    def train(self) -> TrainOutcome:
        """Train from the first step to the last, or to a stop; once."""
        try:
            outcome = self._train()
        except TrainingError:  # on all ranks: a checkpoint under way can still be finished
            self._wait_for_save()
            raise
        finally:
            self.executor.close()
        self.executor.heartbeat.beat("the end of the run", seconds=_PATIENCE_SECONDS)
        return outcome

    def _train(self) -> TrainOutcome:
        self._began = perf_counter()
        done, stopped, phase = self._start, False, self._phases[-1]
        for phase, end in self._segments():
            flush = phase.flush_at_end and end == phase.end_step
            for result in self.executor.run(phase, done, end, flush=flush):
                self._report(result, staleness=phase.schedule.staleness(result.step))
                done, stopped = result.step + 1, stopped or result.stop
            if self._is_evaluated(end) and not stopped:
                stopped = self._evaluate(end, phase).stop
            if stopped and done < self._config.train.steps:
                self._save(done, phase)
                self._wait_for_save()
                return self._outcome("interrupted", done, None)
            if self._is_saved(end):
                self._save(end, phase)
        self._save(done, phase)  # before the pending gradients are applied: with more train.steps it goes on exactly
        for _ in self.executor.run(phase, done, done, flush=True):
            pass
        self.executor.forget_stop()  # one that came too late for any step; the evaluation acts on another
        losses = self._evaluate(done, phase)
        if losses.stop:
            self._wait_for_save()
            return self._outcome("interrupted", done, None)
        self._check_final(losses.of_z)
        self._wait_for_save()
        return self._outcome("completed", done, losses.of_z)

    def _check_final(self, val_loss: float | None) -> None:
        """The last updates are made after the last global norm was looked at, so the weights are looked at too.

        Raises:
            TrainingError: on every rank.
        """
        if not self.executor.has_finite_masters() or not (val_loss is None or math.isfinite(val_loss)):
            raise TrainingError(
                f"the last updates made weights that are not usable (validation loss {val_loss}); try a lower "
                "optimizer.lr or a longer train.warmup_steps"
            )

    def _is_evaluated(self, done: int) -> bool:
        """Whether an evaluation is due after so many steps; the one at the end is apart."""
        interval = self._config.train.eval_interval
        due = interval is not None and self._evaluator.has_data and done % interval == 0
        return due and done < self._config.train.steps

    def _is_saved(self, done: int) -> bool:
        """Whether a checkpoint is due after so many steps; the one at the end is apart."""
        interval = self._config.checkpoint.interval
        return interval is not None and done % interval == 0 and done < self._config.train.steps

    def _save(self, done: int, phase: Phase) -> None:
        """Begin a checkpoint; the pipeline is empty."""
        if self._checkpoints is not None and self._checkpoints.is_due(done):
            start = perf_counter()
            self._wait_for_save()  # of the one before
            is_async = self._config.checkpoint.async_save
            self.executor.heartbeat.beat("a checkpoint", seconds=0.0 if is_async else _PATIENCE_SECONDS)
            if not self.executor.has_finite_masters():
                raise TrainingError(
                    f"step {done}: the weights are not finite, so no checkpoint was made of them; try a lower "
                    "optimizer.lr or a longer train.warmup_steps"
                )
            self._checkpoints.save(done, phase, tokens=self._tokens, train_loss=self._last_loss)
            self.executor.recorder.add_pause(start)
            self._evaluating += perf_counter() - start

    def _wait_for_save(self) -> None:
        if self._checkpoints is not None:
            self.executor.heartbeat.beat("the end of a checkpoint's writing", seconds=_PATIENCE_SECONDS)
            self._checkpoints.wait()

    def _check_time_limit(self, seconds: float) -> None:
        """Ask for an end while there is time for the step under way and a checkpoint."""
        limit = self._config.train.time_limit
        if limit is None:
            return
        self._slowest_step = max(self._slowest_step, seconds)
        saving = 0.0 if self._checkpoints is None else self._checkpoints.longest
        reserve = 2 * self._slowest_step + 2 * saving + self._longest_evaluation
        if perf_counter() - self._started + reserve > limit:
            self.request_stop(requeue=True)

    def _segments(self) -> Iterator[tuple[Phase, int]]:
        """Phases and steps after which the pipeline is emptied: before evaluations, and where a phase ends."""
        for phase in self._phases:
            for done in range(max(phase.first_step, self._start) + 1, phase.end_step + 1):
                if done == phase.end_step or self._is_evaluated(done) or self._is_saved(done):
                    yield phase, done

    def _report(self, result: StepResult, *, staleness: int) -> None:
        step, tokens = result.step, result.tokens
        before = self._finish_times[-1] if self._finish_times else self._began
        finished = result.backward_done_at - self._evaluating
        self._finish_times[1:] = [finished]
        self._tokens += tokens
        self._last_loss = result.loss if result.is_finite else self._last_loss
        self._check_time_limit(finished - before)
        if self._checkpoints is not None:
            self._checkpoints.raise_fault()
        routing = {} if result.expert_load is None else {"expert_load": result.expert_load}
        for name, loss in zip(LOSSES, result.routing_losses, strict=False):
            if getattr(self._config.model.moe, name):
                routing[name] = loss
        self._emit(
            {
                "kind": "train",
                "step": step + 1,
                "loss": result.loss,
                "lr": self._config.optimizer.lr * lr_multiplier(LrShape.of(self._config.train), step),
                "grad_norm": result.grad_norm,
                "tokens": self._tokens,
                "tokens_per_second": tokens / max(finished - before, 1e-9),
                "seconds": finished - before,
                "time": _now(),
                "staleness": staleness,
                **routing,
                **({"skipped": len(self.executor.skipped)} if self.executor.skipped else {}),
            }
        )

    def _emit(self, row: dict[str, Any]) -> None:
        if self._observer is not None:
            self._observer.on_row(row)

    def _evaluate(self, done: int, phase: Phase) -> ValidationLosses:
        """Evaluate and emit the row; the pipeline is empty."""
        if not self._evaluator.has_data:
            return ValidationLosses()
        start, time = perf_counter(), _now()
        losses = self._evaluator.losses(phase)
        self.executor.recorder.add_pause(start)
        self._evaluating += perf_counter() - start
        self._longest_evaluation = max(self._longest_evaluation, perf_counter() - start)
        if not losses.stop:
            of_x = {} if losses.of_x is None else {"loss_x": losses.of_x}
            self._emit({"kind": "val", "step": done, "time": time, "loss": losses.of_z, **of_x})
        return losses

    def _outcome(self, status: str, done: int, val_loss: float | None) -> TrainOutcome:
        mine = (list(self.executor.recorder.spans), self.executor.recorder.pauses, _peak_memory(), self._requeue)
        parts = [mine]
        if dist.is_initialized():
            everywhere = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(mine, everywhere)
            parts = everywhere or parts
        rate = None
        here = done - self._start
        if len(self._finish_times) == 2 and here > 1:
            elapsed = self._finish_times[1] - self._finish_times[0]
            rate = (self._tokens - self._tokens_before) * (here - 1) / here / max(elapsed, 1e-9)
        loss = self._last_loss
        saved = -1 if self._checkpoints is None else self._checkpoints.saved_step
        return TrainOutcome(
            status=status,
            steps=done,
            tokens=self._tokens,
            train_loss=loss if loss is None or math.isfinite(loss) else None,
            val_loss=val_loss,
            tokens_per_second=rate,
            peak_memory_bytes=max(part[2] for part in parts),
            timeline=merge([(part[0], part[1]) for part in parts]),
            requeue=saved > self._start and any(part[3] for part in parts),
            saved_step=None if saved < 0 else saved,
            save_problem=None if self._checkpoints is None else self._checkpoints.problem,
            device_name=torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
        )
