"""What rank 0 shows while it trains: one live line in a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def render_line(row: Mapping[str, Any], *, steps: int, seconds_left: float) -> str:
    """One line about one train row."""
    return (
        f"step {row['step']}/{steps}  loss {row['loss']:.4f}  lr {row['lr']:.3g}  grad norm {row['grad_norm']:.3g}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  staleness {row['staleness']}  left {_clock(seconds_left)}"
    )


class Progress:
    """Shows train and validation rows; a context manager."""

    def __init__(self, *, steps: int, interval: int) -> None:
        self._steps, self._interval = steps, interval
        self._console = Console(soft_wrap=True, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._began, self._first_step = monotonic(), 0

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False)

    def show(self, row: Mapping[str, Any]) -> None:
        """A train row updates the line; a validation row stays."""
        if row["kind"] == "val":
            extra = f"  (at x: {row['loss_x']:.4f})" if "loss_x" in row else ""
            self.say(f"step {row['step']}/{self._steps}  validation loss {row['loss']:.4f}{extra}")
            return
        if self._first_step == 0:
            self._began, self._first_step = monotonic(), row["step"]
        done = max(row["step"] - self._first_step, 1)
        left = (monotonic() - self._began) / done * (self._steps - row["step"])
        line = render_line(row, steps=self._steps, seconds_left=left)
        if self._live is not None:
            self._live.update(Text(line))
        elif row["step"] % self._interval == 0 or row["step"] in (1, self._steps):
            self.say(line)
