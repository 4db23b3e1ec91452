"""What a trainer needs of checkpoints: save now, where to go on, wait."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from megaasync.checkpoint.folders import folder_name, read_meta, wrong_files
from megaasync.checkpoint.keeper import CheckpointKeeper
from megaasync.checkpoint.restore import Position, describe, entries_at, restore
from megaasync.checkpoint.settings import check_settings
from megaasync.checkpoint.stage_state import StageState
from megaasync.config.schema import ConfigError, TrainConfig
from megaasync.distributed.agreement import gathered
from megaasync.pipeline.updates import Updates
from megaasync.schedules import Phase


class RunCheckpoints:
    """The checkpoints of one rank's part of a run.

    Attributes:
        position: where to go on; None at a fresh start.
    """

    def __init__(
        self,
        config: TrainConfig,
        plain: Mapping[str, Any],
        *,
        keeper: CheckpointKeeper | None,
        states: Sequence[StageState],
        updates: Updates,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Checkpoints of a run.

        Args:
            config, plain: of the run, read and as a plain dict.
            keeper: None if the run saves nothing.
            states: of this rank's stages.
            updates: of this rank.
            group: all ranks, over gloo; None for a single rank.
        """
        self._config, self._plain, self._keeper = config, plain, keeper
        self._states, self._updates, self._group = states, updates, group
        self._compensates = config.correction.name == "taylor"
        self.position: Position | None = None

    def resume(self, path: Path, phases: tuple[Phase, ...]) -> None:
        """Load a checkpoint into the stages, and remember where to go on.

        Raises:
            ConfigError: it does not fit.
        """
        problem, meta = None, {}
        try:
            meta = read_meta(path)
            check_settings(meta, self._plain, path, override=self._config.checkpoint.override)
            problem = next(iter(wrong_files(path, part=self._rank, parts=self._world)), None)
            problem = problem and f"checkpoint {path}: {problem}; take an older one with checkpoint.resume=FOLDER"
        except ConfigError as error:
            problem = str(error)
        self._agree(problem)
        self.position = restore(
            path,
            meta,
            states=self._states,
            updates=self._updates,
            phases=phases,
            compensates=self._compensates,
            group=self._group,
        )
        if (
            self._keeper is not None
            and path.name == folder_name(self.position.step)
            and path.parent == self._keeper.root
        ):
            self._keeper.last_step = self.position.step

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)

    @property
    def _world(self) -> int:
        return 1 if self._group is None else dist.get_world_size(self._group)

    def _agree(self, problem: str | None) -> None:
        """All ranks raise if one of them has a problem; a rank that alone gave up would leave the others waiting.

        Raises:
            ConfigError: the first rank's problem.
        """
        if first := next((one for one in gathered(problem, self._group) if one), None):
            raise ConfigError(first)

    @property
    def longest(self) -> float:
        """Seconds that the longest save took."""
        return 0.0 if self._keeper is None else self._keeper.longest

    def is_due(self, step: int) -> bool:
        """Whether there is no checkpoint of `step` yet, and there should be one."""
        return self._keeper is not None and self._keeper.last_step != step

    def save(self, step: int, phase: Phase, *, tokens: int, train_loss: float | None) -> None:
        """Begin a checkpoint after `step` steps, if it `is_due`; the pipeline is empty."""
        meta, own = describe(
            step, tokens=tokens, train_loss=train_loss, phase=phase, states=self._states, updates=self._updates
        )
        made = {
            "layout": {name: getattr(self._config.layout, name) for name in ("pipeline", "data", "expert", "tensor")},
            "torch": torch.__version__,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "config": dict(self._plain),
        }
        entries = entries_at(self._states, step, schedule=phase.schedule, compensates=self._compensates)
        self._keeper.save(step, entries, meta | made, own=own)

    def raise_fault(self) -> None:
        """Raise what only this rank's writing met, so that the run ends."""
        if self._keeper is not None:
            self._keeper.raise_fault()

    def wait(self) -> None:
        """Until the save under way is durable or has failed."""
        if self._keeper is not None:
            self._keeper.wait()
