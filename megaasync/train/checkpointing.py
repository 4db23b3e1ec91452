"""What a trainer needs of checkpoints: save now, where to go on, wait."""

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from megaasync.checkpoint.compatibility import check_settings
from megaasync.checkpoint.paths import folder_name, latest, quarantine, read_meta, wrong_files
from megaasync.checkpoint.restore import ResumePoint, build_metadata, entries_at, restore
from megaasync.checkpoint.stage_state import StageState
from megaasync.checkpoint.writer import AsyncCheckpointWriter
from megaasync.config.plain import in_current_form, to_plain
from megaasync.config.schema import Config, ConfigError
from megaasync.data.identity import Identity
from megaasync.distributed.agreement import all_gather_object
from megaasync.optim.lr_schedule import LearningRate, LrShape
from megaasync.pipeline.step_runner import StepRunner
from megaasync.schedules import Phase


def sound_checkpoint(
    path: Path, folder: Path, *, falls_back: bool, rank: int, world_size: int, notify: Callable[[str], None]
) -> Path:
    """A checkpoint whose checksums are right: `path`, or the newest older one of the run.

    All ranks call it together, before anything of the run is loaded or written; each reads its part of the files.

    Args:
        path: chosen to go on from.
        folder: the run folder.
        falls_back: take an older one in the place of a damaged one, which is renamed.
        rank: of this process.
        world_size: number of ranks.
        notify: tells the user, on rank 0.

    Raises:
        ConfigError: on every rank: it is damaged, and no other is to be taken or there is none.
    """
    while True:
        problems = _told_by_all(next(iter(wrong_files(path, part=rank, parts=world_size)), None), world_size)
        problem = next((found for found in problems if found), None)
        if problem is None:
            return path
        words = f"checkpoint {path}: {problem}"
        if not falls_back:
            raise ConfigError(f"{words}; take an older one with checkpoint.resume=FOLDER")
        older = None
        if rank == 0:
            aside = quarantine(path, "damaged")
            older = latest(folder / "checkpoints")
            if older is not None:
                notify(f"WARNING: {words}; it was renamed to {aside.name}, and the run goes on from {older.path}")
        older = _told_by_all(older and older.path, world_size)[0]
        if older is None:
            raise ConfigError(
                f"{words}; there is no older one in {folder / 'checkpoints'}; begin the run again in another folder"
            )
        path = older


def _told_by_all(mine: Any, world_size: int) -> list[Any]:
    if world_size == 1:
        return [mine]
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, mine)
    return found


class CheckpointManager:
    """The checkpoints of one rank's part of a run.

    Attributes:
        position: where to go on; None at a fresh start.
    """

    def __init__(
        self,
        config: Config,
        *,
        writer: AsyncCheckpointWriter | None,
        states: Sequence[StageState],
        runner: StepRunner,
        group: dist.ProcessGroup | None,
        data: Identity,
    ) -> None:
        """Checkpoints of a run.

        Args:
            config: of the run.
            writer: None if the run saves nothing.
            states: of this rank's stages.
            runner: of this rank.
            group: all ranks, over gloo; None for a single rank.
            data: hashes of tokenizer and tokens.
        """
        self._data = data
        self._config, self._writer = config, writer
        self._states, self._runner, self._group = states, runner, group
        self._compensates = config.correction.name == "taylor"
        self.position: ResumePoint | None = None

    def resume(self, path: Path, phases: tuple[Phase, ...], *, learning_rate: LearningRate) -> None:
        """Load a checkpoint into the stages, and remember where to go on.

        Args:
            path: the folder, whose checksums have been looked at.
            phases: of the config.
            learning_rate: of the stages; updates that the checkpoint has pending keep the rate of their rows.

        Raises:
            ConfigError: it does not fit.
        """
        problem, meta = None, {}
        try:
            meta = read_meta(path)
            check_settings(meta, self._config, path, data=self._data)
        except ConfigError as error:
            problem = str(error)
        self._agree(problem)
        then = in_current_form(meta["config"])
        before = LearningRate(LrShape.of_plain(then["train"]), peak=then["optimizer"]["lr"])
        learning_rate.keep_before(meta["step"], before)
        self.position = restore(
            path,
            meta,
            states=self._states,
            runner=self._runner,
            phases=phases,
            compensates=self._compensates,
            group=self._group,
        )
        if (
            self._writer is not None
            and path.name == folder_name(self.position.step)
            and path.parent.resolve() == self._writer.root.resolve()
        ):
            self._writer.last_step = self._writer.saved_step = self.position.step

    def _agree(self, problem: str | None) -> None:
        """All ranks raise if one of them has a problem; a rank that alone gave up would leave the others waiting.

        Raises:
            ConfigError: the first rank's problem.
        """
        if first := next((found for found in all_gather_object(problem, self._group) if found), None):
            raise ConfigError(first)

    @property
    def longest(self) -> float:
        """Seconds that the longest save took."""
        return 0.0 if self._writer is None else self._writer.longest

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that this start has made or resumed from; -1 if there is none."""
        return -1 if self._writer is None else self._writer.saved_step

    @property
    def problem(self) -> str | None:
        """Why the last save failed; None if it did not."""
        return None if self._writer is None else self._writer.problem

    def is_due(self, step: int) -> bool:
        """Whether there is no checkpoint of `step` yet, and there should be one."""
        return self._writer is not None and self._writer.last_step != step

    def save(self, step: int, phase: Phase, *, tokens: int, train_loss: float | None) -> None:
        """Begin a checkpoint after `step` steps, if it `is_due`; the pipeline is empty."""
        meta, own = build_metadata(
            step, tokens=tokens, train_loss=train_loss, phase=phase, states=self._states, runner=self._runner
        )
        made = {
            "layout": {
                name: getattr(self._config.parallel_dims, name) for name in ("pipeline", "data", "expert", "tensor")
            },
            "torch": torch.__version__,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "config": to_plain(self._config),
            "data": dict(self._data),
        }
        entries = entries_at(self._states, step, schedule=phase.schedule, compensates=self._compensates)
        self._writer.save(step, entries, meta | made, own=own)

    def raise_fault(self) -> None:
        """Raise what only this rank's writing met, so that the run ends."""
        if self._writer is not None:
            self._writer.raise_fault()

    def wait(self) -> None:
        """Until the save under way is durable or has failed."""
        if self._writer is not None:
            self._writer.wait()
