"""Each measured part as plots and as the table of its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from ragcache.bench.report.svg import Bar, Format, Line, Part, bars, lines

Rows = Sequence[dict[str, Any]]
USUAL = 16  # tokens in a block, if nothing else is asked for
NARROW = 400  # width of plots that stand side by side
PARTS = {
    "tokens": ("ours", "KV of tokens"),
    "to_come": ("held", "reserved for tokens still to come"),
    "unused": ("other", "reserved, and never used"),
    "free": ("lost", "free"),
}


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers as text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def packing(rows: Rows) -> tuple[str, Table]:
    """What is in the memory, for each way and length."""
    plots = _key(PARTS.values())
    for lengths, ways in groupby(rows, lambda row: row["lengths"]):
        drawn = [
            Bar(
                row["way"],
                [Part(kind, row[part]) for part, (kind, _) in PARTS.items()],
                f"{row['waste']:.1%} wasted",
            )
            for row in ways
        ]
        plots += titled(f"{lengths}: share of all slots", bars, drawn, 1.0)
    names = [name for _, name in PARTS.values()]
    return plots, Table(
        ["requests", "memory", "wasted", *names],
        [
            [row["lengths"], row["way"], f"{row['waste']:.1%}", *(f"{row[p]:.1%}" for p in PARTS)]
            for row in rows
        ],
    )


def concurrency(rows: Rows) -> tuple[str, Table]:
    """Requests that run at once."""
    plots = ""
    for lengths, ways in groupby(rows, lambda row: row["lengths"]):
        some = list(ways)
        most, least = max(row["running"] for row in some), some[0]["running"]
        drawn = [
            Bar(
                row["way"],
                [Part("ours" if row["way"] == "blocks" else "held", row["running"])],
                f"{row['running']:.1f} ({row['running'] / least:.1f} ×)",
            )
            for row in some
        ]
        plots += titled(f"{lengths}: running requests", bars, drawn, most)
    return plots, Table(
        ["requests", "memory", "running"],
        [[row["lengths"], row["way"], f"{row['running']:.1f}"] for row in rows],
    )


def sharing(rows: Rows) -> tuple[str, Table]:
    """KV memory of each of n requests."""
    series = [
        Line("not shared", "control", [row["unshared"] / 2**20 for row in rows]),
        Line("shared", "ours", [row["shared"] / 2**20 for row in rows]),
    ]
    positions = [f"{row['requests']}" for row in rows]
    axis = "requests at once"
    plot = titled("MiB of KV a request", lines, positions, axis, series, "{:.0f}".format)
    return plot, Table(
        ["requests", "shared, MiB each", "not shared, MiB each", "saved"],
        [
            [
                f"{row['requests']}",
                f"{row['shared'] / 2**20:.0f}",
                f"{row['unshared'] / 2**20:.0f}",
                f"{1 - row['shared'] / row['unshared']:.0%}",
            ]
            for row in rows
        ],
    )


def block_sizes(rows: Rows, ideal: float) -> tuple[str, Table]:
    """What blocks of each size waste, hit and cost."""
    sizes = [f"{row['block_size']}" for row in rows]

    def line(name: str, kind: str, value: Callable[[dict[str, Any]], float]) -> list[Line]:
        return [Line(name, kind, [value(row) for row in rows])]

    usual = next((row for row in rows if row["block_size"] == USUAL), rows[0])
    times = line("attention", "other", lambda row: row["attention_ms"] / usual["attention_ms"])
    times += line("look up", "ours", lambda row: row["lookup_ms"] / usual["lookup_ms"])
    percent, whole = "{:.1%}".format, "{:.0f}".format
    plots = [
        _small("empty share of what is reserved", sizes, line("", "ours", _waste), percent),
        _small(
            "lost hits, share of the prompt tokens",
            sizes,
            line("", "ours", lambda row: ideal - row["hit_rate"]),
            percent,
        ),
        _small(
            "entries in a block table",
            sizes,
            line("", "ours", lambda row: row["entries"]),
            whole,
        ),
        _small(
            f"time, with blocks of {usual['block_size']} as 1",
            sizes,
            times,
            lambda value: f"{_short(value)} ×",
        ),
    ]
    head = [
        "block size",
        "wasted",
        f"hit rate (ideal {ideal:.1%})",
        "table entries",
        "look up, ms",
        "attention, ms",
    ]
    return pair(*plots), Table(
        head,
        [
            [
                f"{row['block_size']}",
                f"{row['waste']:.1%}",
                f"{row['hit_rate']:.1%}",
                f"{row['entries']:.0f}",
                f"{row['lookup_ms']:.2f}",
                f"{row['attention_ms']:.2f}",
            ]
            for row in rows
        ],
    )


def speed(results: dict[str, Any]) -> tuple[str, Table]:
    """Time to first token and throughput with caching on and off."""
    points = results["points"]
    prefixes = [f"{point['prefix']:,}" for point in points]

    def both(figure: str) -> list[Line]:
        return [
            Line("off", "control", [point["off"][figure] for point in points]),
            Line("on", "ours", [point["on"][figure] for point in points]),
        ]

    axis = "tokens of the shared prefix"
    plots = pair(
        _small(
            "time to first token, median",
            prefixes,
            both("ttft"),
            lambda value: f"{_short(value)} s",
            axis,
        ),
        _small("output tokens a second", prefixes, both("output_rate"), _short, axis),
    )
    head = ["shared prefix", "TTFT on, s", "off, s", "tokens/s on", "off", "hit tokens on", "off"]
    return plots, Table(
        head,
        [
            [
                f"{point['prefix']:,}",
                *(f"{point[side]['ttft']:.3f}" for side in ("on", "off")),
                *(f"{point[side]['output_rate']:.1f}" for side in ("on", "off")),
                *(f"{point[side]['hit_tokens']:,.0f}" for side in ("on", "off")),
            ]
            for point in points
        ],
    )


def _short(value: float) -> str:
    """With two digits that say something, and all in front of the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _waste(row: dict[str, Any]) -> float:
    return float(row["waste"])


def _small(
    title: str,
    positions: Sequence[str],
    series: Sequence[Line],
    form: Format,
    axis: str = "tokens in a block",
) -> str:
    plot = lines(title, positions, axis, series, form, width=NARROW)
    return f"<div><h3>{escape(title)}</h3>{plot}</div>"


def titled(title: str, draw: Callable[..., str], *arguments: Any) -> str:
    """A plot below its title."""
    return f"<h3>{escape(title)}</h3>{draw(title, *arguments)}"


def pair(*plots: str) -> str:
    """Plots side by side, where there is room."""
    return f'<div class="pair">{"".join(plots)}</div>'


def _key(kinds: Iterable[tuple[str, str]]) -> str:
    boxes = (
        f'<span><svg viewBox="0 0 12 12"><rect class="{kind}" width="12" height="12"/></svg>'
        f"{escape(name)}</span>"
        for kind, name in kinds
    )
    return f'<div class="key">{"".join(boxes)}</div>'
