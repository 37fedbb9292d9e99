"""What the page says about each part: what was measured, and how to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ragcache.bench.report.figures import (
    Table,
    block_sizes,
    concurrency,
    packing,
    sharing,
    speed,
)


@dataclass(frozen=True, slots=True)
class Section:
    """A claim: what was measured, the plots, and the numbers behind them."""

    title: str
    text: Sequence[str]
    plots: str
    reading: str
    table: Table


def sections(results: dict[str, Any]) -> Iterator[Section]:
    """All sections of the page, from the results of `command.measure`."""
    plots, table = packing(results["packing"])
    yield Section(
        "Memory that holds nothing",
        [
            "Requests of random lengths keep a KV pool of 16,384 slots busy; more are always "
            "waiting. The upper three ways, those that arXiv 2309.06180 compares with, reserve a "
            "piece for each request as it starts; the last is ragcache's block pool.",
        ],
        plots,
        "The paper reports that 60–80% of such reservations are wasted, and under 4% with "
        "blocks. A block pool wastes the empty end of each request's last block, half a block on "
        "average, which is more of a short request than of a long one. Free memory is what a "
        "waiting request did not fit into; the pool keeps some so that all that run can grow.",
        table,
    )
    plots, table = concurrency(results["packing"])
    yield Section(
        "Requests at once in the same memory",
        ["The same runs: how many requests were running, on average over all steps."],
        plots,
        "The more requests share a step, the more tokens each reading of the weights gives.",
        table,
    )
    plots, table = sharing(results["sharing"])
    yield Section(
        "A system prompt of 2,048 tokens, shared",
        [
            "KV memory for each running request behind one system prompt (ShareGPT-like lengths "
            "behind it). The control is the same pool with sharing switched off.",
        ],
        plots,
        "The shared blocks are there once: alone, a request carries all of them; with each one "
        "more, its part gets smaller. For two, the paper reports some 40% less.",
        table,
    )
    plots, table = block_sizes(results["block_sizes"], results["ideal_hit_rate"])
    yield Section(
        "The size of a block",
        [
            "Waste and table size as above. Lost hits are those of agents with a common system "
            "prompt, passages from one corpus and up to six turns: prompt tokens that a cache of "
            "single tokens finds (the control, an independent one), and blocks of this size do "
            "not. Looking up is the CPU time from plan to release of a cached prompt of 8,192 "
            "tokens; attention is one layer's (16 query heads, 4 KV heads of 64) of 8 decodes over "
            "1,024 tokens each.",
        ],
        plots,
        "Small blocks waste less and lose fewer hits, but tables, lookups and kernels have more to "
        "walk. The default of 16 is meant to lose little, and to be looked up in a fraction of "
        "what it takes token by token.",
        table,
    )
    plots, table = speed(results["speed"])
    yield Section(
        "Time, as the shared prefix grows",
        [
            f"Requests to {results['model']} with 64 tokens of their own behind a common prefix, "
            "two in flight, answers of 16 tokens. One engine caches, the other, with the same "
            "weights, does not; they take turns. The request that first computes the prefix is not "
            f"counted. {results['speed']['same_answers']} of {results['speed']['answers']} answers "
            "were the same, token for token.",
        ],
        plots,
        "With caching, the time to the first token should depend on what is new; without, on "
        "all of the prompt.",
        table,
    )
