"""PromQL, against the labels of what a gateway exposes."""

from __future__ import annotations

import re

import promql_parser as promql

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


def check_exposed(query: str, samples: dict[str, list[dict[str, str]]]) -> None:
    """Assert that a query finds series for each of its selectors, and the labels it groups by."""
    selectors = [each for each in nodes(query, promql.VectorSelector) if each.name not in SCRAPED]
    for selector in selectors:
        assert selector.name in samples
        matchers = [each for each in selector.matchers.matchers if each.name not in TARGET]
        series = samples[selector.name]
        assert any(all(matches(m, labels) for m in matchers) for labels in series), series
    labels = {name for each in selectors for labels in samples[each.name] for name in labels}
    assert grouping(query) <= labels | TARGET
