"""report.html: what happened in a run, self-contained; curves and timelines are inline SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 540, 250, 64, 36, 34
_LETTER = 6.2  # width of one, about
_MOST_POINTS = 1500  # of one curve; more cannot be seen
_COLORS = ("#2166ac", "#d6604d", "#4d9221", "#762a83")


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) under a name."""

    name: str
    points: Sequence[tuple[float, float]]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Every n-th point, and the last."""
    every = -(-len(points) // _MOST_POINTS)
    return points if every == 1 else [*points[:-1:every], points[-1]]


def _ticks(low: float, high: float) -> list[float]:
    return [low + (high - low) * i / 4 for i in range(5)]


def _labels(ticks: Sequence[float]) -> list[str]:
    """Ticks as text, with as many digits as it takes to tell them apart."""
    for digits in range(3, 9):
        texts = [f"{y:,.0f}" if abs(y) >= 1000 else f"{y:.{digits}g}" for y in ticks]
        if len(set(texts)) == len(texts):
            break
    return texts


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """(The curves' names as text elements right of the title, in rows; the height of the rows after the first)."""
    parts: list[str] = []
    across, row = _WIDTH - 14.0, 0
    for number, name in enumerate(names):
        wide = _LETTER * len(name) + 14
        if across - wide < _LEFT + (_WIDTH / 2 if row == 0 else 0):  # the title has the left of the first row
            across, row = _WIDTH - 14.0, row + 1
        color = _COLORS[number % len(_COLORS)]
        parts.append(
            f'<text x="{across:.0f}" y="{14 + 14 * row}" text-anchor="end" fill="{color}">{escape(name)}</text>'
        )
        across -= wide
    return parts, 14 * row


def render_curves(curves: Sequence[Curve], *, title: str, x_label: str, y_label: str) -> str:
    """Curves over one pair of axes, as a self-contained SVG element."""
    curves = [Curve(curve.name, _thinned(curve.points)) for curve in curves if curve.points]
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    margin = (y_high - y_low) * 0.05 or max(abs(y_high) * 0.05, 1e-9)
    y_low, y_high = (max(y_low - margin, 0.0) if y_low >= 0 else y_low - margin), y_high + margin
    x_high = x_high if x_high > x_low else x_low + 1
    ticks = _ticks(y_low, y_high)
    texts = _labels(ticks)
    left = max(_LEFT, 32 + _LETTER * max(map(len, texts), default=0))  # room for the numbers beside the label
    legend, more = _legend([curve.name for curve in curves])
    top, bottom = _TOP + more, _HEIGHT + more - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (x - x_low) / (x_high - x_low) * (_WIDTH - left - 14)
        return across, bottom - (y - y_low) / (y_high - y_low) * (bottom - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + more}" font-family="sans-serif" '
        f'font-size="11" role="img"><title>{escape(title)}</title>'
        f'<text x="{_LEFT}" y="14" font-size="14">{escape(title)}</text>',
        *legend,
    ]
    for y, text in zip(ticks, texts, strict=True):
        _, down = at(x_low, y)
        parts.append(
            f'<line x1="{left:.1f}" x2="{_WIDTH - 14}" y1="{down:.1f}" y2="{down:.1f}" stroke="#ddd"/>'
            f'<text x="{left - 6:.1f}" y="{down + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for x in _ticks(x_low, x_high):
        across, _ = at(x, y_low)
        parts.append(f'<text x="{across:.1f}" y="{bottom + 15}" text-anchor="middle">{x:.0f}</text>')
    parts.append(
        f'<text x="{(left + _WIDTH) / 2:.1f}" y="{bottom + _BOTTOM - 5}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text x="14" y="{(top + bottom) / 2}" text-anchor="middle" transform="rotate(-90 14 {(top + bottom) / 2})">'
        f"{escape(y_label)}</text>"
    )
    for number, curve in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve.points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(curve.points) < 3:
            for x, y in (at(*point) for point in curve.points):
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
    return "".join(parts) + "</svg>"


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as an HTML table."""
    head = "".join(f"<th>{escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(show(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def render_facts(facts: Mapping[str, Any]) -> str:
    """Names and values as a table of two columns."""
    body = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(show(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table>{body}</table>"


def show(value: Any) -> str:
    """A value for people."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def render_page(*, title: str, sections: Sequence[tuple[str, str]]) -> str:
    """A page of (heading, HTML) sections."""
    body = "".join(f"<h2>{escape(heading)}</h2>{html}" for heading, html in sections if html)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>'
        "body{font-family:sans-serif;max-width:1140px;margin:24px auto;padding:0 16px;color:#222}"
        "table{border-collapse:collapse;margin:8px 0}td,th{border:1px solid #ccc;padding:4px 10px;text-align:left}"
        "th{background:#f4f4f4}.curves{display:grid;grid-template-columns:1fr 1fr;gap:12px}"
        "pre{background:#f7f7f7;padding:10px;white-space:pre-wrap;font-size:12px}</style></head><body>"
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def metric_curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Loss, gradient norm, learning rate, throughput and expert load of a run's metric rows."""
    train = [row for row in rows if row["kind"] == "train"]
    val = [row for row in rows if row["kind"] == "val"]

    def curve(name: str, source: Sequence[Mapping[str, Any]], field: str) -> Curve:
        points = [(row["step"], row[field]) for row in source if isinstance(row.get(field), int | float)]
        return Curve(name, points)

    losses = [curve("training", train, "loss"), curve("validation (z)", val, "loss")]
    if any("loss_x" in row for row in val):
        losses.append(curve("validation (x)", val, "loss_x"))
    drawings = [
        render_curves(losses, title="loss", x_label="step", y_label="nats per token"),
        render_curves(
            [curve("before clipping", train, "grad_norm")], title="gradient norm", x_label="step", y_label="norm"
        ),
        render_curves([curve("lr", train, "lr")], title="learning rate", x_label="step", y_label="lr"),
        render_curves(
            [curve("tokens/s", train, "tokens_per_second")],
            title="throughput",
            x_label="step",
            y_label="tokens per second",
        ),
    ]
    if any("expert_load" in row for row in train):
        load = curve("busiest expert over the mean", train, "expert_load")
        drawings.append(render_curves([load], title="expert load", x_label="step", y_label="1 is even"))
    return '<div class="curves">' + "".join(f"<div>{drawing}</div>" for drawing in drawings) + "</div>"
