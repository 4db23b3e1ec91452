"""What a rank is started with. Imports no torch: launchers make it before they know whether training will begin."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megaasync.config.schema import Config

if TYPE_CHECKING:
    from megaasync.data.prepare import PreparedData


@dataclass(frozen=True, slots=True)
class RankJob:
    """One rank's part of a run; the same on all ranks but for the folder and the checkpoint, which rank 0 decides.

    Attributes:
        config: validated.
        prepared: where the tokens are.
        folder: the run folder; may be None on other ranks than 0.
        resume: checkpoint to go on from; None for a fresh start, and on other ranks than 0.
        began: `perf_counter` when the run was started on this host, for train.time_limit; None for now.
    """

    config: Config
    prepared: "PreparedData"
    folder: Path | None
    resume: Path | None = None
    began: float | None = None
