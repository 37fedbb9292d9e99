"""Measures step and first-token times over all sizes, and writes the page with their plots."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ragcache.bench.options import ScalingBench
from ragcache.bench.progress import progress
from ragcache.bench.report.speed import machine
from ragcache.bench.scaling.growth import Growth, Rows, of_decode, of_prefill
from ragcache.bench.scaling.page import page
from ragcache.bench.scaling.subject import OUTPUT, Subject
from ragcache.engine.source import find_model
from ragcache.errors import ConfigError

SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # of a prompt that are new, beside a single block


def run(options: ScalingBench) -> dict[str, Any]:
    """All figures, also as a page at `options.output`; raises ConfigError as `measure` does."""
    results = measure(options)
    options.output.write_text(page(results))
    return results | {"page": str(options.output.resolve())}


def render(results: dict[str, Any]) -> RenderableType:
    """Both tables, each with how it grows, and where the page is."""
    growth = {name: Growth(**values) for name, values in results["growth"].items()}
    return Group(
        _decode_table(results["decode"]),
        Text(growth["decode"].of_steps() + "\n"),
        _prefill_table(results["prefill"], results["prompt"]),
        Text(growth["prefill"].of_prompts() + "\n"),
        Text(results["page"], overflow="fold"),
    )


def measure(options: ScalingBench) -> dict[str, Any]:
    """Decode steps by context and batch, and first tokens by how much of the prompt is new.

    Lengths are cut to what the model allows, and what the pool does not hold is left out. Raises
    ConfigError where nothing is left, or the model cannot be loaded.
    """
    with closing(Subject(options.model, options.dtype)) as subject:
        longest = subject.max_len - OUTPUT
        size = subject.block_size
        prompt = min(options.prompt, longest) // size * size
        cases = _cases(options, subject, longest)
        if not cases or not prompt or not subject.fits(1, prompt):
            raise ConfigError("the KV pool, or the model, has no room for any of these lengths")
        subject.decode(*cases[0])  # the first steps of a process are slow
        with progress() as shown:
            decode = [
                {"context": context, "batch": batch, "seconds": subject.decode(batch, context)}
                for batch, context in shown.track(cases, description="decode steps")
            ]
            prefill = _prefill(subject, prompt, options.repeats, shown)
    return {
        "model": find_model(options.model).name,
        "machine": machine(),
        "prompt": prompt,
        "decode": decode,
        "prefill": prefill,
        "growth": {"decode": asdict(of_decode(decode)), "prefill": asdict(of_prefill(prefill))},
    }


def _cases(options: ScalingBench, subject: Subject, longest: int) -> list[tuple[int, int]]:
    """Batch and context of each decode step, by context."""
    contexts = sorted({min(context, longest) for context in options.contexts})
    every = itertools.product(contexts, sorted(set(options.batches)))
    return [(batch, context) for context, batch in every if subject.fits(batch, context)]


def _prefill(subject: Subject, prompt: int, repeats: int, shown: Progress) -> Rows:
    """Medians of some rounds over all sizes."""
    size = subject.block_size
    news = sorted({size, *(max(round(prompt * share) // size, 1) * size for share in SHARES)})
    times: dict[int, list[float]] = {new: [] for new in news}
    for new in shown.track(news * repeats, description="first tokens"):
        times[new].append(subject.prefill(prompt, new))
    return [{"uncached": new, "seconds": median(found)} for new, found in times.items()]


def _decode_table(rows: Rows) -> Table:
    table = Table(title="Time per output token, ms")
    table.add_column("context", justify="right")
    for batch in (batches := sorted({row["batch"] for row in rows})):
        table.add_column(f"batch {batch}", justify="right")
    for context, group in itertools.groupby(rows, lambda row: row["context"]):
        times = {row["batch"]: f"{row['seconds'] * 1e3:.1f}" for row in group}
        table.add_row(f"{context:,}", *(times.get(batch, "-") for batch in batches))
    return table


def _prefill_table(rows: Rows, prompt: int) -> Table:
    table = Table(title=f"Time to first token of {prompt:,} prompt tokens")
    for column in ("new tokens", "first token, ms", "÷ all of them new"):
        table.add_column(column, justify="right")
    whole = rows[-1]["seconds"]
    for row in rows:
        seconds = row["seconds"]
        table.add_row(f"{row['uncached']:,}", f"{seconds * 1e3:.1f}", f"{seconds / whole:.3f}")
    return table
