"""What rank 0 shows while it trains: one live line in a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

_FEWEST_STEPS = 2  # after the first, before the time that is left is estimated


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 10:
        return f"{hours // 24}d{hours % 24:02}h" if hours >= 100 else f"{hours}h{minutes:02}m"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _rate(tokens_per_second: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens_per_second >= 10 * size:
            return f"{tokens_per_second / size:.3g}{unit}"
    return f"{tokens_per_second:.0f}"


def _short(number: float) -> str:
    return f"{number:.1e}".replace("e-0", "e-").replace("e+00", "")


def render_line(row: Mapping[str, Any], *, steps: int, rate: float, seconds: float, seconds_left: float | None) -> str:
    """One line about one train row.

    Args:
        row: of metrics.jsonl.
        steps: of the whole run.
        rate: tokens per second since the last line.
        seconds: of a step, since the last line.
        seconds_left: to the end of the run; None before there is an estimate.
    """
    left = "" if seconds_left is None else f"  left {_clock(seconds_left)}"
    return (
        f"step {row['step']}/{steps}  loss {row['loss']:.4f}  lr {row['lr']:.3g}  grad norm {row['grad_norm']:.3g}  "
        f"{rate:,.0f} tokens/s  {seconds:.3g} s/step  staleness {row['staleness']:g}{left}"
    )


def render_live_line(
    row: Mapping[str, Any], *, steps: int, rate: float, seconds: float, seconds_left: float | None
) -> str:
    """A line as `render_line` makes it, in at most 79 letters."""
    left = "" if seconds_left is None else f" left {_clock(seconds_left)}"
    return (
        f"{row['step']}/{steps} loss {row['loss']:.3f} lr {_short(row['lr'])} norm {row['grad_norm']:.3g} "
        f"{_rate(rate)} tok/s {seconds:.3g} s/step{left}"
    )[:79]


class Progress:
    """Shows train and validation rows; a context manager."""

    def __init__(self, *, steps: int, interval: int) -> None:
        self._steps, self._interval = steps, interval
        self._console = Console(soft_wrap=True, highlight=False)
        # transient: the line goes when the run ends, and the result stands alone
        is_live = self._console.is_terminal
        self._live = Live(console=self._console, refresh_per_second=4, transient=True) if is_live else None
        self._began, self._first_step = monotonic(), 0
        self._tokens = self._seconds = 0.0  # since the last line
        self._rows = 0

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def notify(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False)

    def show(self, row: Mapping[str, Any]) -> None:
        """A train row updates the line; a validation row stays."""
        if row["kind"] == "val":
            extra = f"  (at x: {row['loss_x']:.4f})" if "loss_x" in row else ""
            self.notify(f"step {row['step']}/{self._steps}  validation loss {row['loss']:.4f}{extra}")
            return
        if self._first_step == 0:
            self._began, self._first_step = monotonic(), row["step"]
        self._tokens += row["tokens_per_second"] * row["seconds"]
        self._seconds += row["seconds"]
        self._rows += 1
        is_due = row["step"] % self._interval == 0 or row["step"] in (1, self._steps)
        if self._live is None and not is_due:
            return
        figures = {
            "steps": self._steps,
            "rate": self._tokens / max(self._seconds, 1e-9),
            "seconds": self._seconds / self._rows,
            "seconds_left": self._left(row["step"]),
        }
        if self._live is not None:
            self._live.update(Text(render_live_line(row, **figures), no_wrap=True, overflow="ellipsis"))
        else:
            self.notify(render_line(row, **figures))
        if is_due:
            self._tokens = self._seconds = 0.0
            self._rows = 0

    def _left(self, step: int) -> float | None:
        """Seconds to the end, from all steps of this start but the first, which is slower."""
        done, passed = step - self._first_step, monotonic() - self._began
        if step == self._steps:
            return None
        return passed / done * (self._steps - step) if done >= _FEWEST_STEPS else None
