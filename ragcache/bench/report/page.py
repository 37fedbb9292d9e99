"""The report as one HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from ragcache.bench.report.frame import frame
from ragcache.bench.report.sections import sections

FOOTER = """Memory and hit rates come from the engine's own index (<code>PrefixCache</code>), run
without a model, and are the same for the same seed on every machine. Times are this machine's, with
whatever else it was doing. Lengths are drawn log-normally with the means of arXiv 2309.06180:
prompts of 161 and answers of 338 tokens (ShareGPT-like), 19 and 58 (Alpaca-like), at most 2,048 in
all. One token's KV is counted as 128 KiB, that of a model with 32 layers and 8 KV heads of 128 in
bfloat16."""


def page(results: dict[str, Any]) -> str:
    """The whole page for the results of `command.measure`."""
    where = "{device}; {threads} threads, {dtype}, torch {torch}".format(**results["machine"])
    intro = f"""Measured by <code>ragcache bench report</code>, each figure beside a control from
the same run. On {escape(where)}; seed {results["seed"]}."""
    title = "What paging and sharing gain"
    return frame(title, intro, sections(results), FOOTER, _cards(results))


def _cards(results: dict[str, Any]) -> list[tuple[str, str]]:
    ways = {row["way"]: row for row in results["packing"] if row["lengths"] == "ShareGPT-like"}
    longest, ours = ways["room for the longest"], ways["blocks"]
    last, point = results["sharing"][-1], results["speed"]["points"][-1]
    return [
        (
            f"{longest['waste']:.0%} → {ours['waste']:.1%}",
            "of the reserved KV memory holds nothing: room for the longest request, and blocks",
        ),
        (
            f"{longest['running']:.0f} → {ours['running']:.0f}",
            "requests at once in the same memory, ShareGPT-like",
        ),
        (
            f"{last['shared'] / last['unshared'] - 1:.0%}".replace("-", "−"),
            f"KV memory a request, for {last['requests']} that share a 2,048-token system prompt",
        ),
        (
            f"{point['off']['ttft'] / point['on']['ttft']:.1f} ×",
            f"sooner the first token, behind a prefix of {point['prefix']:,} tokens",
        ),
    ]
