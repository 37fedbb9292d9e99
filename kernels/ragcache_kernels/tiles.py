"""From a step's layout to the tiles of the attention kernels: numpy, on the host.

A tile is some queries × a range of the keys of one row of the block table. Where keys are cut
depends on their positions alone, so a sequence's result does not depend on the rest of the batch:
as long as it shares no run of blocks, or even then, where `exact` tiles are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragcache_kernels.interface import StepLayout
from ragcache_kernels.planner import SharingCost, shared_runs
from ragcache_kernels.ranges import ranges
from ragcache_kernels.triton.configs import NARROW_ROWS

Ints = NDArray[np.int32]

TILE_FIELDS = 7
NARROW_SPLIT = 512  # keys of a tile with few rows: many of them must fill the device
WIDE_SPLIT = 4096  # keys of a tile with many rows: their partial results cost memory
SHARED_RUN = 256  # keys that are read while one more tile begins and ends
WIDE_PARTS = (
    8  # of a GPU: most partial results of a query in a chunk; beyond that, tiles get longer
)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Work of a step for layers with one window and one number of query heads per KV head.

    `narrow` and `wide` are rows of (first, queries, sequence, start, stop, all_see, base): queries
    `tokens[first : first + queries]` attend to the keys at positions [start, stop) of row
    `sequence` of the block table; the keys before `all_see` are visible to all of them. Query i
    writes partial `base + i`. Token t merges the partials `order[ends[t] : ends[t + 1]]`.
    """

    narrow: Ints  # [n, 7]; at most as many rows as the least tile has
    wide: Ints  # [n, 7]
    tokens: Ints
    positions: Ints  # [T], of each token
    ends: Ints  # [T + 1]
    order: Ints  # [P]


def plan_tiles(
    layout: StepLayout,
    window: int | None,
    narrow_queries: int,
    wide_queries: int,
    *,
    exact: bool = False,
) -> Tiles:
    """Cut a step into tiles of at most `narrow_queries` or `wide_queries` queries.

    Exact ones are merged in the same order of sums whatever is shared: shared runs are cut where
    others are, and the keys of a wide tile not at all, but by who works on it. So short chunks, as
    of decodes with drafts, can share, too.
    """
    cu_q, kv_len = layout.cu_q.numpy(), layout.kv_len.numpy()
    num_tokens = len(layout.slot_mapping)
    q_len = np.diff(cu_q)
    covered = np.zeros_like(kv_len)
    extra: list[Ints] = []
    rectangles: list[Ints] = []
    offset = num_tokens
    if window is None:  # a window is short and differs by sequence: little to share
        for rows, start, stop in shared_runs(
            layout,
            np.flatnonzero((q_len > 0) & (q_len <= (narrow_queries if exact else 1))),
            _sharing(narrow_queries, wide_queries, exact),
        ):
            covered[rows] = stop
            # As if behind all keys, so that everything is visible.
            queries = ranges(cu_q[rows], q_len[rows])
            rectangles.append(_ints([[offset, len(queries), rows[0], start, stop, stop]]))
            extra.append(_ints(queries))
            offset += len(queries)
    sequences = np.arange(len(kv_len))
    own = np.stack([cu_q[:-1], q_len, sequences, covered, kv_len, kv_len - q_len], axis=1)
    every = np.concatenate([*rectangles, own.astype(np.int32)])
    is_narrow = every[:, 1] <= narrow_queries
    is_narrow[: len(rectangles)] |= exact
    any_number = int(kv_len.max())
    narrow = _cut(every[is_narrow], narrow_queries, NARROW_SPLIT, any_number, window)
    wide = _cut(every[~is_narrow], wide_queries, WIDE_SPLIT, 1 if exact else WIDE_PARTS, window)
    # Tiles over the same keys start together: the first reads memory, the others find it cached.
    wide = wide[np.lexsort((wide[:, 3], wide[:, 2]))]
    tokens = np.concatenate([np.arange(num_tokens, dtype=np.int32), *extra])
    base = np.cumsum(np.concatenate([[0], narrow[:, 1], wide[:, 1]]))
    narrow[:, 6], wide[:, 6] = np.split(base[:-1], [len(narrow)])
    partial_tokens = tokens[ranges(*np.concatenate([narrow, wide])[:, :2].T)]
    counts = np.bincount(partial_tokens, minlength=num_tokens)
    return Tiles(
        narrow=narrow,
        wide=wide,
        tokens=tokens,
        positions=_positions(cu_q, kv_len, num_tokens),
        ends=_ints(np.concatenate([[0], counts.cumsum()])),
        order=_ints(np.argsort(partial_tokens, kind="stable")),
    )


def _sharing(narrow_queries: int, wide_queries: int, exact: bool) -> SharingCost:
    """An estimate in bytes moved: a partial result is written and read in float32.

    With G query heads per KV head that is as much as 2·G keys and values of half precision.
    """
    group = max(1, NARROW_ROWS // narrow_queries)
    multiple = NARROW_SPLIT if exact else 1
    return SharingCost(SHARED_RUN, 2 * group, wide_queries, multiple)


def _cut(rectangles: Ints, queries: int, split: int, most: int, window: int | None) -> Ints:
    """Rows of (first, queries, sequence, start, stop, position of the first query), cut both ways.

    A position that is `stop` means that all keys are visible to all queries.
    """
    parts = -(-rectangles[:, 1] // queries)
    done = _counts(parts) * queries
    first, count, sequence, start, stop, position = np.repeat(rectangles, parts, axis=0).T
    count, position = np.minimum(queries, count - done), position + done
    stop = np.minimum(stop, position + count)  # what the last query sees
    if window is not None:
        start = np.maximum(start, position - window + 1)
    all_see = np.minimum(stop, position + 1) if window is None else start
    tiles = np.stack([first + done, count, sequence, start, stop, all_see, start], axis=1)
    # Cut at multiples of `split`, wherever a range starts; into at most `most` parts.
    whole = start // split * split
    step = split * -(-(stop - whole) // (split * most))
    parts = -(-(stop - whole) // step)
    step = np.repeat(step, parts)
    cut = np.repeat(whole, parts) + _counts(parts) * step
    tiles = np.repeat(tiles, parts, axis=0)
    tiles[:, 3] = np.maximum(tiles[:, 3], cut)
    tiles[:, 4] = np.minimum(tiles[:, 4], cut + step)
    tiles[:, 5] = np.clip(tiles[:, 5], tiles[:, 3], tiles[:, 4])
    return _ints(tiles)


def _counts(parts: Ints) -> Ints:
    """0 … n − 1 for each n in a row: `[2, 3]` gives `[0, 1, 0, 1, 2]`."""
    return ranges(np.zeros_like(parts), parts)


def _positions(cu_q: Ints, kv_len: Ints, num_tokens: int) -> Ints:
    positions = np.zeros(num_tokens, dtype=np.int32)
    q_len = np.diff(cu_q)
    positions[: cu_q[-1]] = ranges(kv_len - q_len, q_len)
    return positions


def _ints(values: object) -> Ints:
    return np.asarray(values, dtype=np.int32)
