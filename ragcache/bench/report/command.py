"""Measures all parts of the report and writes its page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ragcache.bench.options import ReportBench
from ragcache.bench.progress import progress
from ragcache.bench.report import claims, speed
from ragcache.bench.report.page import page
from ragcache.engine.source import find_model


def run(options: ReportBench) -> dict[str, Any]:
    """All figures, also as a page at `options.output`.

    Raises ConfigError where the model cannot be loaded.
    """
    results = measure(options)
    options.output.write_text(page(results))
    return results | {"page": str(Path(options.output).resolve())}


def render(results: dict[str, Any]) -> RenderableType:
    """The claims, a line each, and where the page is."""
    table = Table()
    for column in ("", "control", "ragcache"):
        table.add_column(column, justify="left" if not column else "right")
    for lengths in ("ShareGPT-like", "Alpaca-like"):
        ways = {row["way"]: row for row in results["packing"] if row["lengths"] == lengths}
        longest, ours = ways["room for the longest"], ways["blocks"]
        table.add_row(f"{lengths}: wasted", f"{longest['waste']:.1%}", f"{ours['waste']:.1%}")
        table.add_row("  at once", f"{longest['running']:.1f}", f"{ours['running']:.1f}")
    last, point = results["sharing"][-1], results["speed"]["points"][-1]
    table.add_row(
        f"MiB each of {last['requests']} behind 2,048 shared tokens",
        *(f"{last[name] / 2**20:.0f}" for name in ("unshared", "shared")),
    )
    table.add_row(
        f"first token behind {point['prefix']:,} shared tokens",
        *(f"{point[side]['ttft']:.2f} s" for side in ("off", "on")),
    )
    return Group(table, Text(results["page"], overflow="fold"))


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    lifetimes: int = claims.LIFETIMES
    block_sizes: tuple[int, ...] = claims.BLOCK_SIZES
    concurrency: tuple[int, ...] = claims.CONCURRENCY
    prefixes: tuple[int, ...] = speed.PREFIXES
    rounds: int = 9


def measure(options: ReportBench, sizes: Sizes = Sizes()) -> dict[str, Any]:
    """The parts in turn, so that none disturbs another; memory first, then time."""
    seed, requests = options.seed, options.requests
    with progress() as shown:
        parts: dict[str, Callable[[], Any]] = {
            "packing": partial(claims.packing, seed, sizes.lifetimes),
            "sharing": partial(claims.sharing, seed, sizes.concurrency, sizes.lifetimes // 12),
            "block_sizes": partial(
                claims.block_sizes, seed, sizes.block_sizes, sizes.lifetimes // 6
            ),
            "ideal_hit_rate": partial(claims.ideal_hit_rate, seed),
            "attention": partial(speed.attention_ms, sizes.block_sizes, sizes.rounds),
        }
        names = shown.track(parts, description="memory and blocks")
        results: dict[str, Any] = {name: parts[name]() for name in names}
        asked = shown.add_task("requests", total=2 * len(sizes.prefixes) * requests)
        advance = partial(shown.advance, asked)
        caching = speed.caching(options.model, requests, seed, advance, sizes.prefixes)
        results["speed"] = asyncio.run(caching)
    for row, milliseconds in zip(results["block_sizes"], results.pop("attention"), strict=True):
        row["attention_ms"] = milliseconds
    name = find_model(options.model).name
    return {"seed": seed, "model": name, "machine": speed.machine(), **results}
