"""The report as one HTML page: no scripts, nothing loaded from elsewhere, light or dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from ragcache.bench.report.figures import Table
from ragcache.bench.report.sections import Section, sections
from ragcache.bench.report.style import STYLE


def page(results: dict[str, Any]) -> str:
    """The whole page for the results of `command.measure`."""
    where = "{device}; {threads} threads, {dtype}, torch {torch}".format(**results["machine"])
    body = "\n".join(_section(section) for section in sections(results))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ragcache: what paging and sharing gain</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>What paging and sharing gain</h1>
<p class="soft">Measured by <code>ragcache bench report</code>, each figure beside a control from
the same run. On {escape(where)}; seed {results["seed"]}.</p>
<div class="cards">{_cards(results)}</div>
{body}
<footer><p>Memory and hit rates come from the engine's own index (<code>PrefixCache</code>), run
without a model, and are the same for the same seed on every machine. Times are this machine's, with
whatever else it was doing. Lengths are drawn log-normally with the means of arXiv 2309.06180:
prompts of 161 and answers of 338 tokens (ShareGPT-like), 19 and 58 (Alpaca-like), at most 2,048 in
all. One token's KV is counted as 128 KiB, that of a model with 32 layers and 8 KV heads of 128 in
bfloat16.</p></footer>
</main>
</body>
</html>
"""


def _cards(results: dict[str, Any]) -> str:
    ways = {row["way"]: row for row in results["packing"] if row["lengths"] == "ShareGPT-like"}
    longest, ours = ways["room for the longest"], ways["blocks"]
    last, point = results["sharing"][-1], results["speed"]["points"][-1]
    cards = [
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
    return "\n".join(
        f'<div class="card"><b>{number}</b><span>{text}</span></div>' for number, text in cards
    )


def _section(section: Section) -> str:
    text = "\n".join(f"<p>{escape(each)}</p>" for each in section.text)
    return f"""<section>
<h2>{escape(section.title)}</h2>
{text}
{section.plots}
<p class="soft">{escape(section.reading)}</p>
<details><summary>The numbers</summary>{_table(section.table)}</details>
</section>"""


def _table(table: Table) -> str:
    def row(tag: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = "\n".join(row("td", cells) for cells in table.rows)
    return f'<div class="scroll"><table>{row("th", table.head)}{rows}</table></div>'
