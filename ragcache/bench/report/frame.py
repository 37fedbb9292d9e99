"""A page of sections: no scripts, nothing loaded from elsewhere, light or dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ragcache.bench.report.figures import Table
from ragcache.bench.report.sections import Section
from ragcache.bench.report.style import STYLE


def frame(
    title: str,
    intro: str,
    sections: Iterable[Section],
    footer: str,
    cards: Iterable[tuple[str, str]] = (),
) -> str:
    """The page; `intro` and `footer` are HTML, cards have a number and what it says."""
    body = "\n".join(map(_section, sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ragcache: {escape(title[0].lower() + title[1:])}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="soft">{intro}</p>
{_cards(cards)}
{body}
<footer><p>{footer}</p></footer>
</main>
</body>
</html>
"""


def _cards(cards: Iterable[tuple[str, str]]) -> str:
    drawn = "\n".join(
        f'<div class="card"><b>{number}</b><span>{text}</span></div>' for number, text in cards
    )
    return f'<div class="cards">{drawn}</div>' if drawn else ""


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
