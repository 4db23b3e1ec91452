"""A schedule as text, and as an SVG or PNG picture: planned, or measured from a run's trace.

    python tools/draw_schedule.py schedule=2bw stages=4 microbatches=8 [out=picture.svg] [key=value ...]
    python tools/draw_schedule.py trace=runs/.../trace.json steps=10-12 out=picture.png

A rank of an interleaved schedule, zbv or wpipe holds several stages; `stages` counts ranks, as parallel.pipeline does.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from megaasync.config import ConfigError, did_you_mean, listed
from megaasync.entry.text_values import load_yaml
from megaasync.observe.timeline_png import write_timeline_png
from megaasync.observe.trace import Timeline, read_chrome_trace
from megaasync.schedules import (
    SCHEDULES,
    Costs,
    ScheduleError,
    ScheduleMetrics,
    Span,
    build_schedule,
    check,
    render_svg,
    render_text,
    schedule_metrics,
    simulate,
)

from ..command_line import check_output, one_message, read_pairs, wants_help


@dataclass(frozen=True, slots=True)
class Drawing:
    """What to draw.

    Attributes:
        schedule: a name.
        stages: pipeline ranks, P.
        microbatches: per step, m.
        virtual_stages: stages per rank; null takes what the schedule needs.
        extra_in_flight: rounds of forwards ahead beyond the minimum.
        steps: how many to plan, or which to cut from a trace (from 1), as in 10-12.
        forward, backward, weight, hop, reduce, step: costs, in one unit; `weight` is W's part of a backward.
        overlap_step: reduction and step run in the background.
        trace: a run's trace.json, or its folder: draw what was measured.
        out: a file that ends in .svg or .png; null prints text only.
    """

    schedule: str = "2bw"
    stages: int = 4
    microbatches: int = 8
    virtual_stages: int | None = None
    extra_in_flight: int = 0
    steps: int | str = 2
    forward: float = 1.0
    backward: float = 2.0
    weight: float = 1.0
    hop: float = 0.0
    reduce: float = 0.0
    step: float = 0.0
    overlap_step: bool = True
    trace: str | None = None
    out: str | None = None


def read_arguments(arguments: list[str]) -> Drawing:
    """The command line as a Drawing.

    Raises:
        ConfigError: names key, value and remedy.
    """
    texts = ("schedule", "trace", "out")
    drawing = read_pairs(Drawing, arguments, parse=lambda key, value: value if key in texts else load_yaml(value))
    if drawing.schedule not in SCHEDULES:
        near = did_you_mean(drawing.schedule, SCHEDULES)
        raise ConfigError(f"schedule={drawing.schedule}: unknown schedule{near}; choose {listed(SCHEDULES)}")
    if drawing.out is not None and Path(drawing.out).suffix not in (".svg", ".png"):
        raise ConfigError(f"out={drawing.out}: must end in .svg or .png")
    if drawing.out is not None:
        check_output("out", Path(drawing.out), is_folder=False)
    for key in ("forward", "backward", "weight", "hop", "reduce", "step"):
        if getattr(drawing, key) < 0 or (key == "forward" and not drawing.forward):
            raise ConfigError(
                f"{key}={getattr(drawing, key):g}: must be {'above' if key == 'forward' else 'at least'} 0"
            )
    for key in ("stages", "microbatches"):
        if getattr(drawing, key) < 1:
            raise ConfigError(f"{key}={getattr(drawing, key)}: must be at least 1")
    return drawing


def steps_of(drawing: Drawing) -> tuple[int, int]:
    """First and last step, from 1.

    Raises:
        ConfigError: not a number or a range.
    """
    first, _, last = str(drawing.steps).partition("-")
    try:
        numbers = (int(first), int(last)) if last else (1, int(first))
    except ValueError:
        raise ConfigError(f"steps={drawing.steps}: must be a number or a range, as in steps=10-12") from None
    if not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"steps={drawing.steps}: must be at least 1, and a range must not be empty")
    return numbers


def draw(path: Path, spans: list[Span], *, title: str, unit: str, start: float, end: float) -> None:
    """Write the picture in the format that its name says."""
    if path.suffix == ".png":
        write_timeline_png(path, spans, title=title, unit=unit, start=start, end=end)
    else:
        path.write_text(render_svg(spans, title=title, unit=unit, start=start, end=end))
    print(path)


def describe(metrics: ScheduleMetrics) -> str:
    """The figures of a plan."""
    return "\n".join(
        (
            f"bubble            {metrics.bubble:.1%} of the steady state; a step takes {metrics.period:.4g}",
            f"exposed step      {metrics.exposed:.4g}",
            f"weight versions   {metrics.versions} per stage",
            f"activations       {metrics.activations} microbatches in flight at most, per stage",
            f"gradient sums     {metrics.gradient_buffers} per stage",
            f"slack             {tuple(round(value, 4) for value in metrics.slack)} from the global norm to the step",
        )
    )


def draw_planned(drawing: Drawing) -> None:
    """Text, metrics, and a picture if asked for.

    Raises:
        ConfigError: the schedule is not defined for these sizes.
    """
    try:
        schedule = build_schedule(
            drawing.schedule,
            num_ranks=drawing.stages,
            num_microbatches=drawing.microbatches,
            virtual_stages=drawing.virtual_stages,
            extra_in_flight=drawing.extra_in_flight,
        )
    except ScheduleError as error:
        raise ConfigError(
            f"schedule={drawing.schedule} stages={drawing.stages} microbatches={drawing.microbatches}: {error}"
        ) from None
    check(schedule)
    costs = Costs(
        drawing.forward, drawing.backward, drawing.weight, reduce=drawing.reduce, step=drawing.step, hop=drawing.hop
    )
    _, last = steps_of(drawing)
    metrics = schedule_metrics(schedule, costs=costs, overlap=drawing.overlap_step)
    print(render_text(schedule, num_steps=last))
    print(describe(metrics))
    if drawing.out is not None:
        spans = simulate(schedule, num_steps=last, costs=costs, overlap=drawing.overlap_step)
        title = (
            f"{drawing.schedule}, P = {drawing.stages}, m = {drawing.microbatches}, planned: bubble "
            f"{metrics.bubble:.1%} of the steady state"
        )
        end = max(span.end for span in spans)
        draw(Path(drawing.out), spans, title=title, unit="forwards", start=0.0, end=end)


def draw_measured(drawing: Drawing) -> None:
    """Some steps of a trace.

    Raises:
        ConfigError: the trace has no such steps.
    """
    path = Path(drawing.trace)
    path = path / "trace.json" if path.is_dir() else path
    try:
        timeline: Timeline = read_chrome_trace(path)
    except OSError as error:
        raise ConfigError(
            f"trace={drawing.trace}: {error.strerror}; give the folder of a run that had logging.trace=true"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"trace={drawing.trace}: is not a trace.json of a run") from None
    if not timeline.spans:
        raise ConfigError(f"trace={drawing.trace}: has no action")
    first, last = steps_of(drawing)
    start, end = timeline.part(first_step=first - 1, last_step=last - 1)
    if end <= start:
        known = sorted({span.action.step + 1 for span in timeline.spans})
        raise ConfigError(f"steps={drawing.steps}: the trace has steps {known[0]} to {known[-1]}")
    bubble = timeline.bubble(num_steps=1 + max(span.action.step for span in timeline.spans))
    share = "" if bubble is None else f", bubble {bubble:.1%} over the run"
    title = f"measured: steps {first} to {last} of {path}{share}"
    print(title)
    if drawing.out is not None:
        draw(Path(drawing.out), timeline.spans, title=title, unit="seconds", start=start, end=end)


def main() -> None:
    """Entry point."""
    if wants_help(Drawing, __doc__):
        return
    with one_message():
        drawing = read_arguments(sys.argv[1:])
        (draw_planned if drawing.trace is None else draw_measured)(drawing)


if __name__ == "__main__":
    main()
