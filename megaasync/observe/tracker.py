"""Weights & Biases behind a queue and a thread: whatever it does, training neither stops nor waits."""

import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaasync.config.schema import WandbConfig

_QUEUE = 10_000  # rows; more are dropped
_CLOSE_SECONDS = 10.0  # how long the end of a run waits for the tracker


class WandbTracker:
    """Hands rows to wandb from a daemon thread, on our own step axis.

    Attributes:
        problem: what went wrong, or None.
    """

    def __init__(self, config: WandbConfig, *, folder: Path, run_config: Mapping[str, Any]) -> None:
        self._config, self._folder, self._run_config = config, folder, run_config
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(_QUEUE)
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="wandb")
        self._thread.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """Queue a row; dropped if the tracker has failed or is too far behind."""
        if self.problem is None:
            try:
                self._rows.put_nowait(dict(row))
            except queue.Full:
                self.problem = f"is {_QUEUE:,} rows behind, so it gets no more of them"

    def close(self) -> None:
        """Let the tracker finish, but not for long."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self.problem = self.problem or f"is {_QUEUE:,} rows behind; the last ones are missing there"
            return
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self.problem = f"did not finish within {_CLOSE_SECONDS:.0f} s"

    def _work(self) -> None:
        try:
            self._track()
        except BaseException as error:  # wandb also raises SystemExit; none of it is training's business
            self.problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

    def _track(self) -> None:
        import wandb

        run = wandb.init(
            mode=self._config.mode,
            project=self._config.project,
            name=self._config.run_name or self._folder.name,
            dir=str(self._folder),
            config=dict(self._run_config),
            settings=wandb.Settings(init_timeout=30, console="off", silent=True),
        )
        for kind in ("train", "val"):
            run.define_metric(f"{kind}/*", step_metric="step")
        while (row := self._rows.get()) is not None:
            kind = row.pop("kind")
            step = row.pop("step")
            run.log({"step": step, **{f"{kind}/{name}": value for name, value in row.items()}})
        run.finish()
