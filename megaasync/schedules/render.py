"""A timeline as text and as SVG: planned (simulated spans) or measured (traced spans)."""

import colorsys
import textwrap
from html import escape

from megaasync.schedules.action import COMPUTE_OPS, Action, Op
from megaasync.schedules.schedule import PipelineSchedule
from megaasync.schedules.simulation import Costs, Span, simulate


def chunk_of(action: Action, num_ranks: int) -> int:
    """Which of its rank's stages an action is of, counted in the order of the model."""
    return action.stage // num_ranks


def render_text(schedule: PipelineSchedule, *, num_steps: int) -> str:
    """The planned timeline, one column per unit of time: F, I and W take one unit, B two.

    Letters are microbatches, digits are steps: ``B1c`` is the backward of the third microbatch of step 1. An
    apostrophe marks a rank's second stage, and so on.
    """
    spans = simulate(schedule, num_steps=num_steps, costs=Costs(forward=1, backward=2, weight=1))
    virtual_stages = schedule.num_stages // schedule.num_ranks
    width = 3 + virtual_stages - 1
    rows = []
    for rank in range(schedule.num_ranks):
        cells: list[str] = []
        for span in (s for s in spans if s.rank == rank and s.action.op in COMPUTE_OPS):
            cells += ["."] * (round(span.start) - len(cells))
            microbatch = chr(ord("a") + (span.action.microbatch or 0) % 26)
            mark = "'" * chunk_of(span.action, schedule.num_ranks)
            cells += [f"{span.action.op.value}{span.action.step}{microbatch}{mark}"]
            cells += ["---"] * (round(span.end - span.start) - 1)
        rows.append(f"rank {rank} |" + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(rows)


_HUES = (212, 28, 140, 280, 0, 180)
_LIGHTNESS = {Op.F: 74, Op.B: 50, Op.I: 56, Op.W: 40}
_ROW, _STRIP, _GAP, _LEFT, _WIDTH = 28, 9, 6, 62, 1100
_LEGEND_LETTERS = 190  # that fit into the width


def color_of(action: Action, *, num_ranks: int) -> str:
    """Colour as #rrggbb: hue for the step, lightness for the operation, paler for later chunks, grey beside compute."""
    if action.op not in COMPUTE_OPS:
        return {Op.STEP: "#333333", Op.REDUCE_GRAD: "#888888"}.get(action.op, "#bbbbbb")
    hue = _HUES[action.step % len(_HUES)] / 360
    saturation = (70 - 38 * min(chunk_of(action, num_ranks), 1)) / 100
    red, green, blue = colorsys.hls_to_rgb(hue, _LIGHTNESS[action.op] / 100, saturation)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def legend_of(spans: list[Span]) -> str:
    """What colours, shades and numbers of a timeline mean."""
    ops = {span.action.op for span in spans}
    shades = ["light = forward (F)"]
    shades += ["dark = backward (B)"] if Op.B in ops else []
    shades += ["middle = input gradient (I)", "dark = weight gradient (W)"] if Op.W in ops else []
    virtual_stages = {span.action.stage for span in spans if span.action.op in COMPUTE_OPS}
    shades += ["pale = the rank's later stages"] if len(virtual_stages) > len({span.rank for span in spans}) else []
    shades += ["grey = norm and optimizer step"] if Op.STEP in {s.action.op for s in spans if s.end > s.start} else []
    shades += (
        ["the strip below a rank runs in the background"]
        if any(span.beside and span.end > span.start for span in spans)
        else []
    )
    return "colour = step; " + ", ".join(shades) + "; number = microbatch"


def render_svg(
    spans: list[Span], *, title: str, unit: str, start: float | None = None, end: float | None = None
) -> str:
    """A timeline of all ranks as a self-contained SVG element.

    Colour is the step, lightness the operation, the number the microbatch; background work stands in a strip below.

    Args:
        spans: what to draw; zero-length spans are left out.
        title: heading of the picture.
        unit: name of the unit of time, for the axis.
        start: where the picture begins; None is the first span's start.
        end: where it ends; None is the last span's end.
    """
    if not spans:
        return f"<p>{escape(title)}: nothing was recorded.</p>"
    start = min(span.start for span in spans) if start is None else start
    end = max(span.end for span in spans) if end is None else end
    ranks = sorted({span.rank for span in spans})
    strip = _STRIP if any(span.beside and span.end > span.start for span in spans) else 0
    pitch = _ROW + strip + _GAP
    scale = (_WIDTH - _LEFT - 10) / max(end - start, 1e-12)
    legend = textwrap.wrap(f"time ({unit}); {legend_of(spans)}", _LEGEND_LETTERS)
    height = 30 + pitch * len(ranks) + 18 + 16 * len(legend)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11" role="img"><title>{escape(title)}</title>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="4" y="16" font-size="14">{escape(title)}</text>',
    ]
    for row, rank in enumerate(ranks):
        top = 28 + pitch * row
        parts.append(f'<text x="4" y="{top + 18}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - 10}" height="{_ROW + strip}" fill="none" '
            'stroke="#ccc"/>'
        )
        for span in spans:
            left, right = max(span.start, start), min(span.end, end)
            if span.rank != rank or right <= left:
                continue
            x, width = _LEFT + (left - start) * scale, (right - left) * scale
            y, tall = (top + _ROW, strip) if span.beside else (top, _ROW)
            color = color_of(span.action, num_ranks=len(ranks))
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{tall}" fill="{color}" '
                f'stroke="#fff" stroke-width="0.5"><title>{span.action}: {left - start:.4g} to {right - start:.4g} '
                f"{escape(unit)}</title></rect>"
            )
            if width > 11 and span.action.microbatch is not None:
                ink = "#222" if span.action.op is Op.F else "#fff"
                parts.append(
                    f'<text x="{x + width / 2:.2f}" y="{top + 18}" text-anchor="middle" fill="{ink}">'
                    f"{span.action.microbatch}</text>"
                )
    axis = 28 + pitch * len(ranks) + 12
    for tick in range(6):
        x = _LEFT + (_WIDTH - _LEFT - 10) * tick / 5
        anchor = "end" if tick == 5 else "middle"
        parts.append(
            f'<text x="{x:.1f}" y="{axis}" text-anchor="{anchor}" fill="#555">{(end - start) * tick / 5:.3g}</text>'
        )
    parts += [
        f'<text x="{_LEFT}" y="{axis + 16 * line}" fill="#555">{escape(words)}</text>'
        for line, words in enumerate(legend, 1)
    ]
    return "".join((*parts, "</svg>"))
