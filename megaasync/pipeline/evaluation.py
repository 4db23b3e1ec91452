"""Validation losses with an empty pipeline: of z, the newest master, and under error feedback of the published x."""

from collections.abc import Mapping
from dataclasses import dataclass

from megaasync.data.microbatches import ValidationMicrobatches
from megaasync.pipeline.executor import Evaluation, Executor
from megaasync.schedules import Phase


@dataclass(frozen=True, slots=True)
class ValidationLosses:
    """Mean losses in nats; None where there is no validation data or a stop came first.

    Attributes:
        of_z: of the newest master weights.
        of_x: of the published weights, under error feedback with a delay; else None.
        stop: some rank asked to stop.
    """

    of_z: float | None = None
    of_x: float | None = None
    stop: bool = False


class Evaluator:
    """Runs evaluations through the pipeline.

    z is written into the slot that the next update overwrites, so that nothing in use is touched and evaluating
    changes no weight.
    """

    def __init__(
        self,
        executor: Executor,
        source: ValidationMicrobatches | None,
        *,
        error_feedback: bool,
        delay_compensation: bool,
    ) -> None:
        """An evaluator.

        Args:
            executor: of this rank.
            source: validation microbatches; None for none.
            error_feedback: published weights look ahead of z, so they are evaluated too.
            delay_compensation: the pending gradient still has to read the weights in the slot that z borrows.
        """
        self._executor, self._source = executor, source
        self._error_feedback, self._keeps_slot = error_feedback, delay_compensation

    @property
    def has_data(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self._source is not None

    def losses(self, phase: Phase) -> ValidationLosses:
        """Evaluate; all ranks call it together, with an empty pipeline."""
        if self._source is None:
            return ValidationLosses()
        newest = {index: stage.num_updates for index, stage in self._executor.runner.stages.items()}
        if not phase.schedule.is_asynchronous:  # the newest version is z
            of_z = self._loss_at(newest)
            return ValidationLosses(of_z.loss, None, of_z.stop)
        borrowed = {index: version + 1 for index, version in newest.items()}
        for index, stage in self._executor.runner.stages.items():
            if stage.versions.num_slots > 1:  # else it has no delay, and its only version is z
                stage.load_master_into_slot(borrowed[index], keeps=self._keeps_slot)
        of_z = self._loss_at(borrowed)
        for index, stage in self._executor.runner.stages.items():
            stage.restore_slot(borrowed[index])
        if not self._error_feedback or of_z.stop:
            return ValidationLosses(of_z.loss, None, of_z.stop)
        of_x = self._loss_at(newest)
        return ValidationLosses(of_z.loss, of_x.loss, of_x.stop)

    def _loss_at(self, versions: Mapping[int, int]) -> Evaluation:
        return self._executor.evaluate(self._source, num_microbatches=self._source.num_microbatches, versions=versions)
