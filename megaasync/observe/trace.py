"""The measured timeline: start and end of every action of every rank, bubble and Chrome trace from it.

Times are `perf_counter` seconds, which on Linux is one clock for all processes of a host.
"""

import bisect
import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from megaasync.schedules import Action, Op, Span, bubble_of

_KEPT_ALWAYS = 20_000  # actions that an untraced run remembers, for its bubble
_KEPT_TRACED = 500_000


class Recorder:
    """Remembers the newest actions of one rank, and the pauses in which it evaluated.

    On a GPU an action's end is only known after a synchronisation, which `synchronize` makes; it is given when
    tracing, and actions go unrecorded without it.
    """

    def __init__(self, rank: int, *, traced: bool, synchronize: Callable[[], None] | None, enabled: bool) -> None:
        self._rank, self._synchronize, self._enabled = rank, synchronize, enabled
        self.spans: deque[Span] = deque(maxlen=_KEPT_TRACED if traced else _KEPT_ALWAYS)
        self.pauses: list[tuple[float, float]] = []

    def add(self, action: Action, start: float, *, beside: bool = False) -> None:
        """An action that began at `start` has ended now; `beside` if it ran in the background of others."""
        if not self._enabled:
            return
        if self._synchronize is not None:
            self._synchronize()
        self.spans.append(Span(self._rank, action, start, perf_counter(), beside))

    def add_pause(self, start: float) -> None:
        """An evaluation that began at `start` has ended now."""
        self.pauses.append((start, perf_counter()))


@dataclass(frozen=True, slots=True)
class Timeline:
    """All ranks' actions on one time axis without the evaluations.

    Attributes:
        spans: seconds from the first action.
        num_ranks: ranks in all.
    """

    spans: list[Span]
    num_ranks: int

    def of_ranks(self, ranks: Sequence[int]) -> "Timeline":
        """The part of some ranks, numbered from 0 in their order."""
        row = {rank: index for index, rank in enumerate(ranks)}
        return Timeline([replace(s, rank=row[s.rank]) for s in self.spans if s.rank in row], len(ranks))

    def bubble(self, *, num_steps: int) -> float | None:
        """Idle share from the first F of step 2 to the last action of step N-1 (1-based), over all ranks.

        None if the run was too short, or nothing was recorded.
        """
        window = self._window(num_steps)
        if window is None:
            return None
        return bubble_of(self.spans, num_ranks=self.num_ranks, first_step=window[0], last_step=window[1])

    def edges(self, *, num_steps: int) -> tuple[float | None, float | None]:
        """Seconds before and after the bubble's window: the pipeline fills and drains there."""
        window = self._window(num_steps)
        if window is None:
            return None, None
        start, end = self.part(first_step=window[0], last_step=window[1])
        return start - min(span.start for span in self.spans), max(span.end for span in self.spans) - end

    def _window(self, num_steps: int) -> tuple[int, int] | None:
        """First and last step (from 0) that the bubble is taken over."""
        steps = self._whole_steps()
        first, last = max(1, min(steps, default=1)), num_steps - 2
        return (first, last) if last >= first and {first, last} <= steps else None

    def _whole_steps(self) -> set[int]:
        """Steps of which every rank still has all forwards: a bounded recorder forgets its oldest actions."""
        counts: dict[int, int] = {}
        for span in self.spans:
            if span.action.op is Op.F:
                counts[span.action.step] = counts.get(span.action.step, 0) + 1
        most = max(counts.values(), default=0)
        return {step for step, count in counts.items() if count == most}

    def part(self, *, first_step: int, last_step: int) -> tuple[float, float]:
        """The interval from the first F of one step to the last action of another."""
        chosen = [span for span in self.spans if first_step <= span.action.step <= last_step]
        forwards = (span.start for span in chosen if span.action.op is Op.F and span.action.step == first_step)
        start = min(forwards, default=0.0)
        return start, max((span.end for span in chosen if span.action.step == last_step), default=start)


def merge(parts: list[tuple[list[Span], list[tuple[float, float]]]]) -> Timeline:
    """Put all ranks' (spans, pauses) on one axis and take the evaluations out of it.

    A pause lasts from the moment the last rank entered it to the moment the last one left it.
    """
    pauses = [
        (max(start for start, _ in same), max(end for _, end in same))
        for same in zip(*(pauses for _, pauses in parts), strict=True)
    ]
    spans = [span for spans, _ in parts for span in spans]
    origin = min((span.start for span in spans), default=0.0)
    starts = [start for start, _ in pauses]
    paused_before = [0.0, *itertools.accumulate(end - start for start, end in pauses)]

    def without_pauses(time: float) -> float:
        begun = bisect.bisect_left(starts, time)
        if not begun:
            return time - origin
        # a rank that left a pause before the last one did may act inside it; that stands where the pause began
        return max(time - paused_before[begun], starts[begun - 1] - paused_before[begun - 1]) - origin

    moved = [replace(s, start=without_pauses(s.start), end=without_pauses(s.end)) for s in spans]
    return Timeline(sorted(moved, key=lambda span: (span.start, span.rank)), len(parts))


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    """Write the timeline for chrome://tracing or Perfetto, in microseconds.

    Thread r is rank r's table, thread num_ranks + r what it does in the background.
    """

    def thread(rank: int, beside: bool) -> int:
        return rank + beside * timeline.num_ranks

    events: list[dict] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": thread(rank, beside),
            "args": {"name": f"rank {rank}{name}"},
        }
        for rank in range(timeline.num_ranks)
        for beside, name in ((False, ""), (True, ", background"))
    ]
    for span in timeline.spans:
        action = span.action
        events.append(
            {
                "ph": "X",
                "name": str(action),
                "cat": action.op.value,
                "pid": 0,
                "tid": thread(span.rank, span.beside),
                "ts": round(span.start * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
                "args": {"stage": action.stage, "step": action.step, "microbatch": action.microbatch},
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def read_chrome_trace(path: Path) -> Timeline:
    """The timeline that `write_chrome_trace` wrote."""
    everything = json.loads(path.read_text())["traceEvents"]
    num_ranks = sum(event["ph"] == "M" for event in everything) // 2
    events = [event for event in everything if event["ph"] == "X"]
    spans = [
        Span(
            event["tid"] % num_ranks,
            Action(Op(event["cat"]), event["args"]["stage"], event["args"]["step"], event["args"]["microbatch"]),
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
            event["tid"] >= num_ranks,
        )
        for event in events
    ]
    return Timeline(sorted(spans, key=lambda span: (span.start, span.rank)), num_ranks)
