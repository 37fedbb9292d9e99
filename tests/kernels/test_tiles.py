"""The tiles of the GPU kernel: every query meets every key that it sees, exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragcache_kernels import StepLayout
from ragcache_kernels import growth as growth_module
from ragcache_kernels import tiles as tiles_module
from ragcache_kernels.growth import TilePlanner
from ragcache_kernels.planner import SharingCost
from ragcache_kernels.tiles import Tiles, plan_tiles
from step_layouts import Pair, expected_pairs, layout_of, layouts, slot

SHARED, OWN, BATCH, BLOCK = 8192, 256, 64, 16


def pairs_of(layout: StepLayout, tiles: Tiles, window: int | None) -> Counter[Pair]:
    pairs: Counter[Pair] = Counter()
    for first, queries, sequence, start, stop, all_see, _ in [*tiles.narrow, *tiles.wide]:
        for token in tiles.tokens[first : first + queries].tolist():
            position = tiles.positions[token]
            for key in range(start, stop):
                in_window = window is None or key > position - window
                if key < all_see or (key <= position and in_window):
                    pairs[token, slot(layout, int(sequence), key)] += 1
    return pairs


def partials_of(tiles: Tiles, token: int) -> list[int]:
    return sorted(tiles.order[tiles.ends[token] : tiles.ends[token + 1]].tolist())


@given(
    layout=layouts(),
    window=st.none() | st.integers(1, 45),
    queries=st.tuples(st.integers(1, 4), st.integers(4, 9)),
    splits=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    min_shared=st.integers(1, 30),
    exact=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_visible_pair_is_covered_once_and_every_partial_merged(
    layout: StepLayout,
    window: int | None,
    queries: tuple[int, int],
    splits: tuple[int, int],
    min_shared: int,
    exact: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            SharingCost, "is_worth", lambda _, n, __, keys: (n - 1) * keys >= min_shared
        )
        patched.setattr(tiles_module, "NARROW_SPLIT", splits[0])
        patched.setattr(tiles_module, "WIDE_SPLIT", splits[1])
        tiles = plan_tiles(layout, window, *queries, exact=exact)
    assert pairs_of(layout, tiles, window) == expected_pairs(layout, window)
    written: dict[int, list[int]] = {}
    for kind, most, split in zip((tiles.narrow, tiles.wide), queries, splits, strict=True):
        for first, count, _, start, stop, _, base in kind:
            assert 0 < count <= most
            parts = 1 if exact else tiles_module.WIDE_PARTS
            longer = -(-45 // (split * parts)) if kind is tiles.wide else 1
            assert 0 < stop - start <= split * longer
            for i, token in enumerate(tiles.tokens[first : first + count].tolist()):
                written.setdefault(token, []).append(int(base) + i)
    assert all(partials_of(tiles, token) == sorted(ids) for token, ids in written.items())
    assert sorted(tiles.order.tolist()) == list(range(len(tiles.order)))


def decoding(length: int) -> StepLayout:
    """64 sequences of `length` tokens after the step, of which 8,192 are in shared blocks."""
    shared = list(range(SHARED // BLOCK))
    own = -(-(length - SHARED) // BLOCK)
    tables = [shared + list(range(10_000 + 99 * i, 10_000 + 99 * i + own)) for i in range(BATCH)]
    return layout_of([(1, length)] * BATCH, tables, BLOCK)


def moved(layout: StepLayout) -> StepLayout:
    """The first sequence has a copy of a shared block instead."""
    table = layout.block_table.clone()
    table[0, 100] = 9_999
    return replace(layout, block_table=table)


def keys_from_memory(tiles: Tiles) -> int:
    """What a KV head's tiles read in launch order; next to each other, the same keys count once."""
    runs = groupby(map(tuple, np.concatenate([tiles.narrow, tiles.wide])[:, 2:5].tolist()))
    return sum(stop - start for (_, start, stop), _ in runs)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
def test_a_shared_prefix_is_read_once_for_the_whole_batch(group: int) -> None:
    tiles = plan_tiles(decoding(SHARED + OWN), None, max(1, 16 // group), 128 // group)
    assert keys_from_memory(tiles) <= 1.1 * (SHARED + BATCH * OWN)
    assert len(tiles.wide) == -(-BATCH // (128 // group)) * SHARED // tiles_module.WIDE_SPLIT


def test_short_chunks_share_exact_tiles() -> None:
    chunks = replace(
        decoding(SHARED + OWN),
        cu_q=torch.arange(0, 3 * BATCH + 1, 3, dtype=torch.int32),
        slot_mapping=torch.zeros(3 * BATCH, dtype=torch.int64),
    )
    read = keys_from_memory(plan_tiles(chunks, None, 20, 20, exact=True))
    assert read <= -(-3 * BATCH // 20) * SHARED + BATCH * OWN
    assert keys_from_memory(plan_tiles(chunks, None, 20, 20)) == BATCH * (SHARED + OWN)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_sixteen_requests_gain_from_256_shared_tokens(group: int) -> None:
    tables = [[*range(16), 100 + i] for i in range(16)]
    layout = layout_of([(1, 17 * BLOCK)] * 16, tables, BLOCK)
    tiles = plan_tiles(layout, None, max(1, 16 // group), 128 // group)
    keys = sum(int((kind[:, 4] - kind[:, 3]).sum()) for kind in (tiles.narrow, tiles.wide))
    assert keys == 16 * BLOCK + 256


def test_a_chunk_over_a_long_context_needs_bounded_scratch() -> None:
    layout = layout_of([(512, 131_072)], [list(range(131_072 // BLOCK))], BLOCK)
    tiles = plan_tiles(layout, None, 4, 32)
    assert len(tiles.order) == tiles_module.WIDE_PARTS * 512


@given(
    layout=layouts(),
    window=st.none() | st.integers(1, 45),
    padding=st.integers(0, 2),
    split=st.integers(1, 9),
    exact=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_batch_that_decodes_on_is_covered_as_if_planned_anew(
    layout: StepLayout, window: int | None, padding: int, split: int, exact: bool
) -> None:
    size, count = layout.block_size, len(layout.kv_len)
    room = torch.arange(20_000, 20_000 + 99 * count, dtype=torch.int32).view(count, 99)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SharingCost, "is_worth", lambda _, n, __, keys: (n - 1) * keys >= 3)
        for module in (tiles_module, growth_module):
            patched.setattr(module, "NARROW_SPLIT", split)
        planner, before = TilePlanner(exact=exact), layout.kv_len
        for step in range(8):
            table = torch.nn.functional.pad(layout.block_table, (0, 8))
            width = int((before + step + size - 1).max()) // size
            unused = torch.arange(table.shape[1]) >= -(-before // size)[:, None]
            table = torch.where(unused, room[:, : table.shape[1]], table)[:, :width]
            decode = StepLayout(
                cu_q=torch.arange(count + 1, dtype=torch.int32),
                kv_len=before + step,
                block_table=table,
                slot_mapping=torch.zeros(count + padding, dtype=torch.int64),
                block_size=size,
            )
            tiles = planner.plan(decode, window, 2, 4)
            assert pairs_of(decode, tiles, window) == expected_pairs(decode, window)
            assert all(tiles.ends[count:] == len(tiles.order))
            assert sorted(tiles.order.tolist()) == list(range(len(tiles.order)))
            for first, queries, *_, base in [*tiles.narrow, *tiles.wide]:
                for i, token in enumerate(tiles.tokens[first : first + queries].tolist()):
                    assert int(base) + i in partials_of(tiles, token)


@pytest.mark.parametrize("window", [None, SHARED + 100])
def test_a_batch_that_decodes_on_is_not_planned_anew(window: int | None) -> None:
    planner = TilePlanner()
    first = SHARED + OWN - 40
    planner.plan(decoding(first), window, 4, 32)
    with patch.object(growth_module, "plan_tiles", side_effect=AssertionError):
        for length in range(first, SHARED + OWN + 300):  # a tile becomes full on the way
            planner.plan(decoding(length), window, 4, 32)


@pytest.mark.parametrize(
    "change",
    [
        lambda after: decoding(SHARED + OWN + 1),  # two tokens further
        moved,
        lambda after: replace(after, kv_len=after.kv_len - torch.eye(BATCH, dtype=torch.int32)[0]),
    ],
    ids=["skips a token", "moved", "one waits"],
)
def test_any_other_step_is_planned_anew(change) -> None:  # type: ignore[no-untyped-def]
    planner = TilePlanner()
    planner.plan(decoding(SHARED + OWN - 1), None, 4, 32)
    layout = change(decoding(SHARED + OWN))
    assert_same(planner.plan(layout, None, 4, 32), plan_tiles(layout, None, 4, 32))


def test_tables_may_be_wider_than_they_need_be() -> None:
    planner, before, after = TilePlanner(), decoding(SHARED + OWN - 1), decoding(SHARED + OWN)
    wide = torch.nn.functional.pad(before.block_table, (0, 3))
    planner.plan(replace(before, block_table=wide), None, 4, 32)
    assert_same(planner.plan(after, None, 4, 32), plan_tiles(after, None, 4, 32))


def test_a_full_tile_is_followed_by_another() -> None:
    planner, lengths = TilePlanner(), (511, 512, 513, 514)
    for length in lengths:
        layout = layout_of([(1, length)], [list(range(33))], BLOCK)
        tiles = planner.plan(layout, None, 16, 128)
        assert_same(tiles, plan_tiles(layout, None, 16, 128))
    assert len(tiles.narrow) == 2


def assert_same(one: Tiles, other: Tiles) -> None:
    for name in ("narrow", "wide", "tokens", "positions", "ends", "order"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
