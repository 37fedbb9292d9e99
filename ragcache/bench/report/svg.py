"""A few kinds of plots as SVG; colours are classes, so that the page decides on light and dark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 640
BAR, ROW = 22, 34  # heights
LABELS = 150  # width of the names in front of bars
NOTES = 110  # width of the notes behind them
TOP, BOTTOM, LEFT = 16, 46, 58  # margins of lines; their names stand at their right ends
LETTER = 8  # width
LINES_HEIGHT = 260

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar, of the class `kind`."""

    kind: str
    value: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of parts, its name in front and a note behind it."""

    name: str
    parts: Sequence[Part]
    note: str


@dataclass(frozen=True, slots=True)
class Line:
    """Values over the positions of a plot, of the class `kind`."""

    name: str
    kind: str
    values: Sequence[float]


def bars(title: str, rows: Sequence[Bar], most: float) -> str:
    """Bars on a scale from 0 to `most`."""
    scale = (WIDTH - LABELS - NOTES) / most
    parts, y = [], 6
    for row in rows:
        parts.append(_text(LABELS - 10, y + 15, row.name, anchor="end"))
        x = float(LABELS)
        for part in row.parts:
            width = part.value * scale
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"'
            parts.append(f'<rect class="{part.kind}" {box}/>')
            x += width
        parts.append(_text(x + 8, y + 15, row.note, kind="note"))
        y += ROW
    return _svg(title, WIDTH, y, parts)


def lines(
    title: str,
    positions: Sequence[str],
    axis: str,
    series: Sequence[Line],
    form: Format,
    *,
    width: int = WIDTH,
    places: Sequence[float] | None = None,
) -> str:
    """Lines from 0 up; the last point of each has its value, and it may end early.

    Positions lie at rising `places`, or are equally spaced.
    """
    top = _round_up(max(max(line.values) for line in series))
    names = [f"{line.name} {form(line.values[-1])}".strip() for line in series]
    right = width - 20 - LETTER * max(map(len, names))
    bottom = LINES_HEIGHT - BOTTOM
    places = places or range(len(positions))
    scale = (right - LEFT) / max(places[-1] - places[0], 1)

    def x(i: int) -> float:
        return LEFT + (places[i] - places[0]) * scale

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / top

    parts = [_grid(y(top * i / 4), right, form(top * i / 4)) for i in range(5)]
    for i, position in enumerate(positions):
        parts.append(_text(x(i), bottom + 18, position, anchor="middle", kind="tick"))
    parts.append(_text((LEFT + right) / 2, bottom + 38, axis, anchor="middle", kind="tick"))
    ends = _apart([y(line.values[-1]) for line in series])
    for line, name, end in zip(series, names, ends, strict=True):
        points = [(x(i), y(value)) for i, value in enumerate(line.values)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline class="line {line.kind}" points="{path}"/>')
        for (px, py), value, position in zip(points, line.values, positions, strict=False):
            parts.append(
                f'<circle class="{line.kind}" cx="{px:.1f}" cy="{py:.1f}" r="4">'
                f"<title>{escape(f'{line.name}, {position}: {form(value)}')}</title></circle>"
            )
        parts.append(_text(right + 10, end + 4, name, kind=f"label {line.kind}"))
    return _svg(title, width, LINES_HEIGHT, parts)


def _svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<div class="scroll"><svg role="img" aria-label="{escape(title)}"'
        f' viewBox="0 0 {width} {height}"'
        f' style="max-width: {width * 9 // 8}px; min-width: {width * 5 // 8}px">'
    )
    return "\n".join([head, *parts, "</svg></div>"])


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "name") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _grid(y: float, right: float, label: str) -> str:
    line = f'<path class="grid" d="M{LEFT} {y:.1f}H{right:.1f}"/>'
    return line + _text(LEFT - 8, y + 4, label, anchor="end", kind="tick")


def _round_up(value: float) -> float:
    """The next number that divides into four round steps."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    steps = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
    return next(step * power for step in steps if step * power >= value)


def _apart(heights: Sequence[float], least: float = 16) -> list[float]:
    """The same heights, moved up as far as labels need to be legible."""
    moved, last = [0.0] * len(heights), LINES_HEIGHT + least
    for i in sorted(range(len(heights)), key=heights.__getitem__, reverse=True):
        last = moved[i] = min(heights[i], last - least)
    return moved
