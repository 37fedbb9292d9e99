"""The page of `ragcache bench scaling`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import cycle
from typing import Any

from ragcache.bench.report.figures import NARROW, Table, pair, titled
from ragcache.bench.report.frame import frame
from ragcache.bench.report.sections import Section
from ragcache.bench.report.svg import WIDTH, Line, lines
from ragcache.bench.scaling.growth import Growth, Rows

KINDS = ("ours", "other", "control")  # colours
FOOTER = """Contexts and cached parts of prompts are blocks of random keys and values, which the
engine finds in its index as it finds computed ones; all else is what <code>ragcache serve</code>
runs. Times are this machine's, with whatever else it was doing."""


def page(results: dict[str, Any]) -> str:
    """The whole page for the results of `command.measure`."""
    where = "{device}; {threads} threads, {dtype}, torch {torch}".format(**results["machine"])
    intro = f"""Measured by <code>ragcache bench scaling</code> with {escape(results["model"])}, in
process. On {escape(where)}."""
    return frame("How the cost of a token grows", intro, _sections(results), FOOTER)


def _sections(results: dict[str, Any]) -> Iterator[Section]:
    growth = {name: Growth(**values) for name, values in results["growth"].items()}
    decode, prefill, prompt = results["decode"], results["prefill"], results["prompt"]
    yield Section(
        "An output token, by context and batch",
        ["The time from one decode step to the next; each sequence gets a token in every step."],
        pair(_over(decode, "batch", "context"), _over(decode, "context", "batch")),
        growth["decode"].of_steps(),
        Table(
            ["context", "batch", "step, ms", "per token, ms"],
            [
                [
                    f"{row['context']:,}",
                    f"{row['batch']}",
                    f"{row['seconds'] * 1e3:.2f}",
                    f"{row['seconds'] * 1e3 / row['batch']:.2f}",
                ]
                for row in decode
            ],
        ),
    )
    yield Section(
        "The first token, by how much of its prompt is new",
        [f"The prompt has {prompt:,} tokens; all but the new ones are found in the cache."],
        _first_token(prefill),
        growth["prefill"].of_prompts(),
        Table(
            ["new tokens", "first token, ms"],
            [[f"{row['uncached']:,}", f"{row['seconds'] * 1e3:.1f}"] for row in prefill],
        ),
    )


def _over(rows: Rows, across: str, each: str) -> str:
    """Step times over one size, with lines for the least, a middle and the largest other one."""
    positions = sorted({row[across] for row in rows})
    times = {(row[across], row[each]): row["seconds"] * 1e3 for row in rows}
    series = [
        Line(f"{value:,}:", kind, [times[at, value] for at in positions if (at, value) in times])
        for value, kind in zip(_some(sorted({row[each] for row in rows})), cycle(KINDS))
    ]
    title = f"ms a step over the {across}, for each {each}"
    return f"<div>{titled(title, _plot, positions, across, series, NARROW)}</div>"


def _some(values: Sequence[int]) -> list[int]:
    """At most three of them."""
    return sorted({values[0], values[len(values) // 2], values[-1]})


def _first_token(rows: Rows) -> str:
    series = [Line("", KINDS[0], [row["seconds"] * 1e3 for row in rows])]
    positions = [row["uncached"] for row in rows]
    return titled("ms to the first token", _plot, positions, "new tokens", series, WIDTH)


def _plot(
    title: str, positions: Sequence[int], axis: str, series: Sequence[Line], width: int
) -> str:
    labels = [f"{position:,}" for position in positions]
    return lines(title, labels, axis, series, "{:,.0f}".format, width=width, places=positions)
