"""Results as a picture that any browser shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

ROW, LEFT, WIDTH = 34, 330, 420


def chart(title: str, results: Sequence[dict[str, Any]]) -> str:
    """SVG: how much of the slower floor's speed each step reached, and its gain if there is one."""
    height = ROW * (len(results) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 260}" height="{height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
    ]
    for i, result in enumerate(results, start=1):
        parts += _row(result, ROW * i + ROW // 2)
    end = ROW * (len(results) + 1)
    parts.append(f'<path d="M{LEFT + WIDTH} {ROW} V{end}" stroke="black" stroke-dasharray="4"/>')
    parts.append(f'<text x="{LEFT + WIDTH - 20}" y="{end + 16}">floor</text></svg>')
    return "\n".join(parts) + "\n"


def _row(result: dict[str, Any], y: int) -> list[str]:
    reached = max(result["memory_seconds"], result["compute_seconds"]) / result["seconds"]
    note = f"{reached:.0%}, {result['seconds'] * 1e3:.3g} ms"
    if "gain" in result:
        note += f", {result['gain']:.2f} × {result['control_name']}"
    length = round(min(reached, 1) * WIDTH)
    return [
        f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(result["name"])}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{length}" height="{ROW - 14}" fill="#4878a8"/>',
        f'<text x="{LEFT + length + 6}" y="{y + 14}">{escape(note)}</text>',
    ]
