"""A timeline as text and as SVG: planned (simulated spans) or measured (traced spans)."""

from html import escape

from megaasync.schedules.action import COMPUTE_OPS, Op
from megaasync.schedules.schedule import PipelineSchedule
from megaasync.schedules.simulation import Costs, Span, simulate


def render_text(schedule: PipelineSchedule, *, num_steps: int) -> str:
    """The planned timeline, one column per unit of time, forward one unit and backward two.

    Letters are microbatches, digits are steps: ``B1c`` is the backward of the third microbatch of step 1.
    """
    spans = simulate(schedule, num_steps=num_steps, costs=Costs(forward=1, backward=2))
    rows = []
    for rank in range(schedule.num_ranks):
        cells: list[str] = []
        for span in (s for s in spans if s.rank == rank and s.action.op in COMPUTE_OPS):
            cells += ["."] * (round(span.start) - len(cells))
            microbatch = chr(ord("a") + (span.action.microbatch or 0) % 26)
            cells += [f"{span.action.op.value}{span.action.step}{microbatch}"]
            cells += ["---"] * (round(span.end - span.start) - 1)
        rows.append(f"rank {rank} |" + " ".join(cell.ljust(3) for cell in cells).rstrip())
    return "\n".join(rows)


_HUES = (212, 28, 140, 280, 0, 180)
_ROW, _LEFT, _WIDTH = 34, 62, 1100


def _color(span: Span) -> str:
    if span.action.op is Op.STEP:
        return "#444"
    hue = _HUES[span.action.step % len(_HUES)]
    return f"hsl({hue} 70% {72 if span.action.op is Op.F else 52}%)"


def render_svg(
    spans: list[Span], *, title: str, unit: str, start: float | None = None, end: float | None = None
) -> str:
    """A timeline of all ranks as a self-contained SVG element.

    Colour is the step; light is forward, dark is backward, grey is the optimizer step; the number is the microbatch.

    Args:
        spans: what to draw; zero-length spans are left out.
        title: heading of the picture.
        unit: name of the unit of time, for the axis.
        start, end: cut the picture to this interval.
    """
    if not spans:
        return f"<p>{escape(title)}: nothing was recorded.</p>"
    start = min(span.start for span in spans) if start is None else start
    end = max(span.end for span in spans) if end is None else end
    ranks = sorted({span.rank for span in spans})
    scale = (_WIDTH - _LEFT - 10) / max(end - start, 1e-12)
    height = 30 + _ROW * len(ranks) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11" role="img"><title>{escape(title)}</title>',
        f'<text x="4" y="16" font-size="14">{escape(title)}</text>',
    ]
    for row, rank in enumerate(ranks):
        top = 28 + _ROW * row
        parts.append(f'<text x="4" y="{top + 18}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - 10}" height="{_ROW - 6}" fill="none" stroke="#ccc"/>'
        )
        for span in spans:
            left, right = max(span.start, start), min(span.end, end)
            if span.rank != rank or right <= left:
                continue
            x, width = _LEFT + (left - start) * scale, (right - left) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 6}" fill="{_color(span)}" '
                f'stroke="#fff" stroke-width="0.5"><title>{span.action}: {left - start:.4g} to {right - start:.4g} '
                f"{escape(unit)}</title></rect>"
            )
            if width > 11 and span.action.microbatch is not None:
                parts.append(
                    f'<text x="{x + width / 2:.2f}" y="{top + 18}" text-anchor="middle" fill="#fff">'
                    f"{span.action.microbatch}</text>"
                )
    axis = 28 + _ROW * len(ranks) + 12
    for tick in range(6):
        x = _LEFT + (_WIDTH - _LEFT - 10) * tick / 5
        anchor = "end" if tick == 5 else "middle"
        parts.append(
            f'<text x="{x:.1f}" y="{axis}" text-anchor="{anchor}" fill="#555">{(end - start) * tick / 5:.3g}</text>'
        )
    parts.append(
        f'<text x="{_LEFT}" y="{axis + 16}" fill="#555">time ({escape(unit)}); colour = step, light = forward, '
        "dark = backward, grey = optimizer step, number = microbatch</text></svg>"
    )
    return "".join(parts)
