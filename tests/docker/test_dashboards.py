"""Every query of the dashboards and alerts, against what a gateway really exposes."""

from __future__ import annotations

import re

import pytest
from queries import check_exposed, grouping
from shipped import DASHBOARDS, expression, queries, read

QUERIES = list(queries())


@pytest.mark.parametrize(
    ("where", "title", "query"), QUERIES, ids=lambda value: re.sub(r"\W+", "-", value)[:40]
)
def test_every_metric_and_label_is_exposed(where, title, query, samples):
    check_exposed(query, samples)


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
