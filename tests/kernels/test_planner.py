"""The planner's work items: every query meets every key that it sees, exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragcache_kernels import StepLayout
from ragcache_kernels import planner as planner_module
from ragcache_kernels.planner import Visibility, WorkItem, plan_items

Pair = tuple[int, int]  # query token, slot


def layout_of(
    lengths: list[tuple[int, int]], tables: list[list[int]], block_size: int
) -> StepLayout:
    width = max(len(table) for table in tables)
    return StepLayout(
        cu_q=torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int(),
        kv_len=torch.tensor([kv for _, kv in lengths], dtype=torch.int32),
        block_table=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        slot_mapping=torch.zeros(sum(q for q, _ in lengths), dtype=torch.int64),
        block_size=block_size,
    )


def slot(layout: StepLayout, sequence: int, position: int) -> int:
    block = int(layout.block_table[sequence, position // layout.block_size])
    return block * layout.block_size + position % layout.block_size


def expected_pairs(layout: StepLayout, window: int | None) -> Counter[Pair]:
    pairs: Counter[Pair] = Counter()
    for s, length in enumerate(layout.kv_len.tolist()):
        start, stop = layout.cu_q[s : s + 2].tolist()
        for token in range(start, stop):
            last = length - stop + token
            first = max(0, last + 1 - (window or last + 1))
            pairs.update((token, slot(layout, s, p)) for p in range(first, last + 1))
    return pairs


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


@st.composite
def layouts(draw: st.DrawFn) -> StepLayout:
    """Sequences whose block tables form a tree."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    fresh = iter(range(10_000))
    lengths, tables = [], []
    for _ in range(draw(st.integers(1, 6))):
        kv = draw(st.integers(1, 40))
        q = draw(st.sampled_from([1, 1, 1, min(2, kv), kv]))
        shared: list[int] = []
        if tables:
            limit = (kv - q) // block_size
            shared = draw(st.sampled_from(tables))[: draw(st.integers(0, limit))]
        table = shared + [next(fresh) for _ in range(-(-kv // block_size) - len(shared))]
        lengths.append((q, kv))
        tables.append(table)
    return layout_of(lengths, tables, block_size)


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
        patch.setattr(planner_module, "MIN_SHARED_KEYS", min_shared)
        items = plan_items(layout, window, max_keys)
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
    assert shared_items(plan_items(layout, None, 10_000)) == [
        ([0, 1, 2], 0, 1600),
        ([0, 1], 1600, 2560),
    ]


def test_a_prefix_too_short_to_be_worth_a_pass_is_read_by_each() -> None:
    layout = layout_of([(1, 33), (1, 33)], [[1, 2, 3], [1, 2, 4]], 16)
    assert shared_items(plan_items(layout, None, 10_000)) == []


def test_windowed_layers_skip_what_no_query_sees() -> None:
    layout = layout_of([(1, 1000), (100, 1000)], [list(range(63)), list(range(63, 126))], 16)
    items = plan_items(layout, 200, 10_000)
    assert min(item.start for item in items) == 900 - 200 + 1
    assert sum(item.keys for item in items if len(item.tokens) == 1) == 200
