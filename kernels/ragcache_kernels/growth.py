"""Tiles from one step to the next: a batch that decodes on is not planned anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ragcache_kernels.interface import StepLayout
from ragcache_kernels.tiles import NARROW_SPLIT, Ints, Tiles, plan_tiles

Key = tuple[int | None, int, int]


class TilePlanner:
    """Plans steps, from the one before where that only grew; `exact` as in `plan_tiles`."""

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self._last: dict[Key, tuple[StepLayout, Tiles]] = {}

    def plan(
        self, layout: StepLayout, window: int | None, narrow_queries: int, wide_queries: int
    ) -> Tiles:
        """What `plan_tiles` gives, or as good."""
        if window is not None and window >= int(layout.kv_len.max()):
            window = None
        key = window, narrow_queries, wide_queries
        tiles = grown(*self._last[key], layout, window) if key in self._last else None
        tiles = tiles or plan_tiles(layout, *key, exact=self._exact)
        self._last[key] = layout, tiles
        return tiles


def grown(before: StepLayout, tiles: Tiles, layout: StepLayout, window: int | None) -> Tiles | None:
    """The tiles of a step that adds at most a key to each sequence of the one before; else None.

    Blocks that sequences have come to share since are read once for each of them.
    """
    if not _decodes_on(before, layout):
        return None
    old, new = before.kv_len.numpy(), layout.kv_len.numpy()
    if np.array_equal(old, new):
        return tiles
    if not np.array_equal(old + 1, new):
        return None
    narrow = tiles.narrow.copy()
    full = old % NARROW_SPLIT == 0
    last = np.flatnonzero((narrow[:, 4] == old[narrow[:, 2]]) & ~full[narrow[:, 2]])
    narrow[last, 4] += 1
    if window is not None:  # it moves on, unless its first tile ends
        first = np.flatnonzero(narrow[:, 3] == (old - window)[narrow[:, 2]])
        narrow[first, 3] += 1
        if (narrow[first, 3] == narrow[first, 4]).any():
            return None
        narrow[:, 5] = narrow[:, 3]
    else:
        narrow[last, 5] += 1
    positions = tiles.positions.copy()
    positions[: len(old)] += 1
    return _with_new_tiles(replace(tiles, narrow=narrow, positions=positions), full, new, window)


def _decodes_on(before: StepLayout, layout: StepLayout) -> bool:
    """Whether both steps are decodes of the same sequences.

    Of their blocks only those that can be shared matter, which are full.
    """
    cu_q = layout.cu_q.numpy()
    if cu_q[-1] != len(cu_q) - 1 or not np.array_equal(cu_q, before.cu_q.numpy()):
        return False
    if len(layout.slot_mapping) != len(before.slot_mapping):
        return False  # another number of padding tokens
    table, known = layout.block_table.numpy(), before.block_table.numpy()
    if layout.block_size != before.block_size or table.shape[1] < known.shape[1]:
        return False
    full = (before.kv_len.numpy() - 1) // layout.block_size
    if np.array_equal(table[:, : known.shape[1]], known):
        return True
    shared = np.arange(known.shape[1]) < full[:, None]
    return not ((table[:, : known.shape[1]] != known) & shared).any()


def _with_new_tiles(tiles: Tiles, full: Ints, kv_len: Ints, window: int | None) -> Tiles:
    """Another tile for each sequence whose last one was full."""
    rows = np.flatnonzero(full)
    if not len(rows):
        return tiles
    start, stop = kv_len[rows] - 1, kv_len[rows]
    base = len(tiles.order) + np.arange(len(rows))
    all_see = stop if window is None else start
    queries = np.ones_like(rows)
    added = np.stack([rows, queries, rows, start, stop, all_see, base], axis=1, dtype=np.int32)
    ends = tiles.ends.copy()
    ends[1 : len(full) + 1] += np.cumsum(full, dtype=np.int32)
    ends[len(full) + 1 :] += len(rows)
    return replace(
        tiles,
        narrow=np.concatenate([tiles.narrow, added]),
        ends=ends,
        order=np.insert(tiles.order, tiles.ends[rows + 1], base),
    )
