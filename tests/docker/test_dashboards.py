"""Every query of the dashboards and alerts, against what a gateway really exposes."""

from __future__ import annotations

import re

import promql_parser as promql
import pytest
from shipped import DASHBOARDS, expression, queries, read

QUERIES = list(queries())
SCRAPED = {"up"}  # what Prometheus adds by itself
TARGET = {"instance", "job"}


def nodes(query: str, kind: type) -> list:
    """The parts of a query that are of one kind."""
    found = []
    promql.walk(promql.parse(query), lambda node: found.append(node) or True)
    return [node for node in found if isinstance(node, kind)]


def grouping(query: str) -> set[str]:
    """The labels that a query groups by."""
    modifiers = (node.modifier for node in nodes(query, promql.AggregateExpr))
    return {label for modifier in modifiers if modifier for label in modifier.labels}


def matches(matcher: promql.Matcher, labels: dict[str, str]) -> bool:
    """Whether a series has such a label."""
    if matcher.name not in labels:
        return False
    pattern = matcher.value if "Re" in str(matcher.op) else re.escape(matcher.value)
    return ("Not" in str(matcher.op)) != bool(re.fullmatch(pattern, labels[matcher.name]))


@pytest.mark.parametrize(
    ("where", "title", "query"), QUERIES, ids=lambda value: re.sub(r"\W+", "-", value)[:40]
)
def test_every_metric_and_label_is_exposed(where, title, query, samples):
    selectors = [each for each in nodes(query, promql.VectorSelector) if each.name not in SCRAPED]
    for selector in selectors:
        assert selector.name in samples
        matchers = [each for each in selector.matchers.matchers if each.name not in TARGET]
        series = samples[selector.name]
        assert any(all(matches(m, labels) for m in matchers) for labels in series), series
    labels = {name for each in selectors for labels in samples[each.name] for name in labels}
    assert grouping(query) <= labels | TARGET


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_legends_name_labels_that_the_query_keeps(path):
    for panel in read(path)["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= grouping(expression(target["expr"]))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap_and_say_what_they_show(path):
    taken: set[tuple[int, int]] = set()
    panels = read(path)["panels"]
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"]["uid"] == "prometheus"
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))


def test_dashboards_have_ids_of_their_own_and_link_to_each_other():
    boards = [read(path) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) >= 2
    for board in boards:
        assert board["tags"] == board["links"][0]["tags"] == ["ragcache"]
