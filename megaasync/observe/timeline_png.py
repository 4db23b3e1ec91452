"""A timeline as a PNG picture, as `megaasync.schedules.render_svg` draws it."""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.patches import Rectangle

from megaasync.schedules import Op, Span, color_of, legend_of


def write_timeline_png(
    path: Path, spans: list[Span], *, title: str, unit: str, start: float | None = None, end: float | None = None
) -> None:
    """Draw a timeline; arguments as of `render_svg`."""
    mpl.use("Agg")
    start = min(span.start for span in spans) if start is None else start
    end = max(span.end for span in spans) if end is None else end
    ranks = sorted({span.rank for span in spans})
    has_strip = any(span.beside and span.end > span.start for span in spans)
    tall, strip = (0.66, 0.22) if has_strip else (0.86, 0.0)
    figure, axis = pyplot.subplots(figsize=(14, 1.4 + 0.5 * len(ranks)), layout="constrained")
    inches_per_unit = 12.5 / (end - start)
    for span in spans:
        left, right = max(span.start, start), min(span.end, end)
        if right <= left:
            continue
        top = ranks.index(span.rank) + (tall if span.beside else 0.0)
        height = strip if span.beside else tall
        color = color_of(span.action, num_ranks=len(ranks))
        box = Rectangle((left - start, top), right - left, height, facecolor=color, edgecolor="white", linewidth=0.4)
        axis.add_patch(box)
        if span.action.microbatch is not None and (right - left) * inches_per_unit > 0.1:
            ink = "#222222" if span.action.op is Op.F else "white"
            middle = ((left + right) / 2 - start, top + height / 2)
            axis.text(*middle, str(span.action.microbatch), ha="center", va="center", fontsize=6.5, color=ink)
    axis.set_xlim(0, end - start)
    axis.set_ylim(len(ranks), -0.1)
    axis.set_yticks([row + 0.4 for row in range(len(ranks))], [f"rank {rank}" for rank in ranks])
    axis.set_xlabel(f"time ({unit})\n{legend_of(spans)}", fontsize=8)
    axis.set_title(title, loc="left", fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
