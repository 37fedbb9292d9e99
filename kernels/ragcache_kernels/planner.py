"""From a step's layout to attention work items: numpy, on the host, once per step and window.

An item is a rectangle of query tokens × keys. Several items may share queries; each gives a
partial result with its log-sum-exp, and partials merge exactly (FlashInfer, arXiv 2501.01005).
Bounding a rectangle bounds scratch memory; sharing keys between sequences (cascade and tree
prefixes: Hydragen, arXiv 2402.05099; DeFT, arXiv 2404.00242) is one more way to cut rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ragcache_kernels.interface import StepLayout

MAX_QUERIES = 512
# A shared run must save this many key reads, or its own pass costs more than it saves.
MIN_SHARED_KEYS = 512

IntArray = NDArray[np.integer]


class Visibility(Enum):
    """Which keys of its item a query sees: always at least one."""

    ALL = "all"
    CAUSAL = "causal"  # query i of the item sees its keys 0 … i
    WINDOW = "window"  # by position: key in (query − window, query]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """`tokens` attend to the keys at positions [start, stop) of block-table row `sequence`.

    With a visibility other than ALL the tokens are consecutive, the first at `position`. Items
    of rank 0 cover every token exactly once; those of a higher rank add to them.
    """

    tokens: IntArray
    sequence: int
    start: int
    stop: int
    rank: int
    position: int
    visibility: Visibility = Visibility.ALL

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.stop - self.start


def plan_items(layout: StepLayout, window: int | None, max_keys: int) -> list[WorkItem]:
    """Cut a step into items of at most `MAX_QUERIES` tokens and `max_keys` keys, by rank."""
    cu_q, kv_len = layout.cu_q.numpy(), layout.kv_len.numpy()
    q_len = np.diff(cu_q)
    items, covered = [], np.zeros_like(kv_len)
    if window is None:  # a window is short and differs by sequence: little to share
        decodes = np.flatnonzero(q_len == 1)
        for rows, start, stop in _shared_runs(layout, decodes):
            items += _shared_items(cu_q[rows], int(rows[0]), start, stop, max_keys)
            covered[rows] = stop
    for sequence in range(len(kv_len)):
        position = int(kv_len[sequence] - q_len[sequence])
        tokens = np.arange(cu_q[sequence], cu_q[sequence + 1])
        for i in range(0, len(tokens), MAX_QUERIES):
            tile = tokens[i : i + MAX_QUERIES]
            if len(tile) > 1:
                items += _chunk_items(tile, sequence, position + i, window, max_keys)
            else:
                first = max(int(covered[sequence]), _first_visible(position + i, window))
                items += _decode_items(tile, sequence, first, position + i, max_keys)
    return sorted(items, key=lambda item: item.rank)


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _cut(start: int, stop: int, max_keys: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in as few equal ranges as `max_keys` allows."""
    parts = -(-(stop - start) // max_keys)
    bounds = [start + (stop - start) * i // parts for i in range(parts + 1)] if parts else []
    return pairwise(bounds)


def _decode_items(
    tokens: IntArray, sequence: int, first: int, position: int, max_keys: int
) -> list[WorkItem]:
    return [
        WorkItem(tokens, sequence, start, stop, rank, position)
        for rank, (start, stop) in enumerate(_cut(first, position + 1, max_keys))
    ]


def _shared_items(
    tokens: IntArray, sequence: int, first: int, last: int, max_keys: int
) -> list[WorkItem]:
    return [
        WorkItem(tokens, sequence, start, stop, rank=1, position=last)
        for start, stop in _cut(first, last, max_keys)
    ]


def _chunk_items(
    tokens: IntArray, sequence: int, position: int, window: int | None, max_keys: int
) -> list[WorkItem]:
    """The diagonal square; the keys that only the first tokens still see; those all see."""
    end = position + len(tokens)
    first = all_see = 0
    diagonal = Visibility.CAUSAL
    items = []
    if window is not None:
        first = _first_visible(position, window)
        all_see = min(max(end - window, first), position)
        if window < len(tokens):
            diagonal = Visibility.WINDOW
    items.append(WorkItem(tokens, sequence, position, end, 0, position, diagonal))
    if window is not None and first < all_see:
        some = tokens[: all_see - position + window - 1]
        items.append(WorkItem(some, sequence, first, all_see, 1, position, Visibility.WINDOW))
    for start, stop in _cut(all_see, position, max_keys):
        items.append(WorkItem(tokens, sequence, start, stop, 1, position))
    return items


def _shared_runs(layout: StepLayout, rows: IntArray) -> Iterator[tuple[IntArray, int, int]]:
    """Key ranges that several of the decoding `rows` hold in the same physical blocks.

    Walks the radix tree that the block tables form, a group of rows per node.
    """
    table, size = layout.block_table.numpy(), layout.block_size
    limit = (layout.kv_len.numpy() - 1) // size  # full blocks before the query's own
    groups = [(rows, 0)]
    while groups:
        rows, start = groups.pop()
        if len(rows) < 2:
            continue
        stop = _common_blocks(table[rows, : limit[rows].min()])
        if (stop - start) * size * (len(rows) - 1) >= MIN_SHARED_KEYS:
            yield rows, start * size, stop * size
            start = stop
        rows = rows[limit[rows] > stop]
        groups += [
            (rows[table[rows, stop] == block], start) for block in np.unique(table[rows, stop])
        ]


def _common_blocks(tables: IntArray) -> int:
    """Number of leading columns in which all rows agree."""
    differs = (tables != tables[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else tables.shape[1]
