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

IntArray = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class SharingCost:
    """What it costs to read a run of keys once for several queries.

    The unit is one query's reading of one key. Every run is work of its own, and gives each query
    one more partial result to merge. At most `together` queries read it in one pass. It ends at a
    `multiple` of so many keys.
    """

    per_run: int
    per_query: int
    together: int
    multiple: int = 1

    def is_worth(self, sequences: int, queries: int, keys: int) -> bool:
        """Whether it is less work than if each sequence, for its queries, reads the keys alone."""
        passes = -(-queries // self.together)
        return (sequences - passes) * keys > self.per_run + self.per_query * queries


class Visibility(Enum):
    """Which keys of its item a query sees: always at least one."""

    ALL = "all"
    CAUSAL = "causal"  # query i of the item sees its keys 0 … i
    WINDOW = "window"  # by position: key in (query − window, query]


@dataclass(frozen=True, slots=True)
class WorkItem:
    """`tokens` attend to the keys at positions [start, stop) of block-table row `sequence`.

    Items of rank 0 cover every token exactly once; those of a higher rank add to them. If not
    all keys are visible, the tokens are consecutive and the first is at `position`.
    """

    tokens: IntArray
    sequence: int
    start: int
    stop: int
    rank: int
    visibility: Visibility = Visibility.ALL
    position: int = 0

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.stop - self.start


def plan_items(
    layout: StepLayout, window: int | None, max_keys: int, sharing: SharingCost
) -> list[WorkItem]:
    """Cut a step into items of at most `max_keys` keys, ordered by rank.

    Those of a chunk have at most `MAX_QUERIES` tokens, and `max_keys` must not be below that.
    """
    cu_q, kv_len = layout.cu_q.numpy(), layout.kv_len.numpy()
    q_len = np.diff(cu_q)
    items, covered = [], np.zeros_like(kv_len)
    if window is None:  # a window is short and differs by sequence: little to share
        decodes = np.flatnonzero(q_len == 1)
        for rows, start, stop in shared_runs(layout, decodes, sharing):
            items += _unmasked(cu_q[rows], int(rows[0]), start, stop, max_keys, rank=1)
            covered[rows] = stop
    for sequence in range(len(kv_len)):
        position = int(kv_len[sequence] - q_len[sequence])
        tokens = np.arange(cu_q[sequence], cu_q[sequence + 1])
        for i in range(0, len(tokens), MAX_QUERIES):
            tile = tokens[i : i + MAX_QUERIES]
            if len(tile) > 1:
                items += _chunk_items(tile, sequence, position + i, window, max_keys)
            else:
                start = max(int(covered[sequence]), _first_visible(position + i, window))
                items += _unmasked(tile, sequence, start, position + i + 1, max_keys, rank=0)
    return sorted(items, key=lambda item: item.rank)


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _cut(start: int, stop: int, max_keys: int) -> Iterator[tuple[int, int]]:
    """[start, stop) in as few equal ranges as `max_keys` allows."""
    parts = -(-(stop - start) // max_keys)
    bounds = [start + (stop - start) * i // parts for i in range(parts + 1)] if parts else []
    return pairwise(bounds)


def _unmasked(
    tokens: IntArray, sequence: int, start: int, stop: int, max_keys: int, rank: int
) -> list[WorkItem]:
    """Keys that all tokens see, in items of rising rank."""
    return [
        WorkItem(tokens, sequence, *part, rank + i)
        for i, part in enumerate(_cut(start, stop, max_keys))
    ]


def _chunk_items(
    tokens: IntArray, sequence: int, position: int, window: int | None, max_keys: int
) -> list[WorkItem]:
    """The diagonal square; the keys that only the first tokens still see; those all see."""
    end = position + len(tokens)
    start = _first_visible(position, window)
    all_see, diagonal, edge = start, Visibility.CAUSAL, []
    if window is not None:
        all_see = min(max(end - window, start), position)
        if window < len(tokens):
            diagonal = Visibility.WINDOW
        if start < all_see:
            some = tokens[: all_see - position + window - 1]
            edge = [WorkItem(some, sequence, start, all_see, 1, Visibility.WINDOW, position)]
    square = WorkItem(tokens, sequence, position, end, 0, diagonal, position)
    return [square, *edge, *_unmasked(tokens, sequence, all_see, position, max_keys, rank=1)]


def shared_runs(
    layout: StepLayout, rows: IntArray, sharing: SharingCost
) -> Iterator[tuple[IntArray, int, int]]:
    """Key ranges of the decoding `rows` that are worth reading once for several of them.

    They lie in the same physical blocks, before all queries of the rows. Walks the radix tree that
    the block tables form, a group of rows per node.
    """
    table, size = layout.block_table.numpy(), layout.block_size
    q_len = np.diff(layout.cu_q.numpy())
    limit = (layout.kv_len.numpy() - q_len) // size  # full blocks before the queries' own
    groups = [(rows, 0)]
    while groups:
        rows, start = groups.pop()
        if len(rows) < 2:
            continue
        common = _common_blocks(table[rows, : limit[rows].min()])
        stop = common * size // sharing.multiple * sharing.multiple
        if sharing.is_worth(len(rows), int(q_len[rows].sum()), stop - start):
            yield rows, start, stop
            start = stop
        rows = rows[limit[rows] > common]
        groups += [
            (rows[table[rows, common] == block], start) for block in np.unique(table[rows, common])
        ]


def _common_blocks(tables: IntArray) -> int:
    """Number of leading columns in which all rows agree."""
    differs = (tables != tables[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else tables.shape[1]
