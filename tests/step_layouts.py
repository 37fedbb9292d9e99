"""Step layouts for tests of whatever plans them, and what a plan must cover."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import strategies as st
from ragcache_kernels import StepLayout

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
