"""The planner's work items: every query meets every key that it sees, exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragcache_kernels import StepLayout
from ragcache_kernels import planner as planner_module
from ragcache_kernels.planner import SharingCost, Visibility, WorkItem, plan_items
from ragcache_kernels.torch_stack import SHARING
from step_layouts import Pair, expected_pairs, layout_of, layouts, slot


def pairs_of(layout: StepLayout, item: WorkItem, window: int | None) -> list[Pair]:
    pairs = []
    for i, token in enumerate(item.tokens.tolist()):
        keys = range(item.start, item.stop)
        if item.visibility is Visibility.CAUSAL:
            keys = range(item.start, item.start + i + 1)
        elif item.visibility is Visibility.WINDOW:
            assert window is not None
            query = item.position + i
            keys = range(max(item.start, query - window + 1), min(item.stop, query + 1))
        assert len(keys) > 0, "a query of the item sees none of its keys"
        pairs += [(token, slot(layout, item.sequence, p)) for p in keys]
    return pairs


@given(
    layout=layouts(),
    window=st.none() | st.integers(1, 45),
    max_queries=st.integers(1, 12),
    more_keys=st.integers(0, 30),
    min_shared=st.integers(1, 30),
)
@settings(max_examples=200, deadline=None)
def test_every_visible_pair_is_covered_once_within_the_limits(
    layout: StepLayout, window: int | None, max_queries: int, more_keys: int, min_shared: int
) -> None:
    max_keys = max_queries + more_keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_module, "MAX_QUERIES", max_queries)
        sharing = SharingCost(per_run=min_shared, per_query=0, together=100)
        items = plan_items(layout, window, max_keys, sharing)
    covered = Counter(pair for item in items for pair in pairs_of(layout, item, window))
    assert covered == expected_pairs(layout, window)
    assert all(item.keys <= max_keys for item in items)
    firsts = [token for item in items if item.rank == 0 for token in item.tokens.tolist()]
    assert sorted(firsts) == list(range(int(layout.cu_q[-1])))
    assert [item.rank for item in items] == sorted(item.rank for item in items)


def shared_items(items: list[WorkItem]) -> list[tuple[list[int], int, int]]:
    return [(i.tokens.tolist(), i.start, i.stop) for i in items if len(i.tokens) > 1]


def test_a_prefix_tree_is_read_once_per_node() -> None:
    trunk, branch = list(range(100)), list(range(100, 160))
    tables = [trunk + branch + [900], trunk + branch + [901], [*trunk, 902], [903]]
    layout = layout_of([(1, 161 * 16), (1, 161 * 16), (1, 101 * 16), (1, 16)], tables, 16)
    assert shared_items(plan_items(layout, None, 10_000, SHARING)) == [
        ([0, 1, 2], 0, 1600),
        ([0, 1], 1600, 2560),
    ]


def test_a_prefix_too_short_to_be_worth_a_pass_is_read_by_each() -> None:
    layout = layout_of([(1, 33), (1, 33)], [[1, 2, 3], [1, 2, 4]], 16)
    assert shared_items(plan_items(layout, None, 10_000, SHARING)) == []


def test_windowed_layers_skip_what_no_query_sees() -> None:
    layout = layout_of([(1, 1000), (100, 1000)], [list(range(63)), list(range(63, 126))], 16)
    items = plan_items(layout, 200, 10_000, SHARING)
    assert min(item.start for item in items) == 900 - 200 + 1
    assert sum(item.keys for item in items if len(item.tokens) == 1) == 200


@pytest.mark.parametrize(
    ("sharing", "queries", "keys", "expected"),
    [
        (SHARING, 2, 256, False),
        (SHARING, 2, 1024, True),
        (SHARING, 8, 64, False),
        (SHARING, 16, 128, True),
        (SharingCost(per_run=0, per_query=0, together=4), 4, 1, True),
        (SharingCost(per_run=0, per_query=0, together=1), 4, 1, False),  # each reads it anyway
        (SharingCost(per_run=0, per_query=8, together=4), 4, 10, False),
    ],
)
def test_a_run_is_shared_where_that_is_less_work(
    sharing: SharingCost, queries: int, keys: int, expected: bool
) -> None:
    assert sharing.is_worth(queries, queries, keys) is expected
    assert not sharing.is_worth(1, queries, keys)  # which one alone reads once for all
