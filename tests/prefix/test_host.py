"""Blocks that move to host memory and back: exact ids, swaps, references and queues."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ragcache.prefix.names import namespace_name, owner_name
from ragcache.types import PoolCounts

OTHER = namespace_name(owner_name("model", "other"))


@pytest.fixture
def cache(make_cache: Callable[..., object]):
    """Four blocks of four tokens on the device, six on the host."""
    return make_cache(4, host_blocks=6)


def host_queue(cache) -> list[int]:
    return [block.id for block in cache.host.pool.queue()]


def host_refs(cache) -> list[int]:
    return [block.ref_count for block in cache.host.pool.blocks]


def test_what_is_evicted_lives_on_on_the_host(cache):
    cache.serve([1] * 16)  # blocks 3 to 0, in the order in which they are evicted
    assert cache.start("a", [2] * 12).table == [3, 2, 1]
    assert cache.take_swaps() == ([(3, 0), (2, 1), (1, 2)], [])
    assert host_refs(cache) == [1, 1, 1, 0, 0, 0]
    assert cache.refs() == [0, 2, 2, 2]  # the row, and the swap that reads the block
    cache.copies_done()
    assert cache.refs() == [0, 1, 1, 1]
    assert cache.host.pool.counts() == PoolCounts(free=3, cached=3, held=0)
    assert host_queue(cache) == [3, 4, 5, 0, 1, 2]
    assert cache.evictions == 3
    assert cache.host.evictions == 0


def test_without_host_blocks_it_is_forgotten(make_cache):
    cache = make_cache(4)
    cache.serve([1] * 16)
    cache.start("a", [2] * 12)
    assert cache.take_swaps() == ([], [])
    assert cache.hit([1] * 17) == 4


def test_a_prefix_comes_back_in_the_place_of_its_host_blocks(cache):
    cache.serve([1] * 16)
    cache.serve([2] * 12)
    plan = cache.plan([1] * 16, cache.tenant)
    assert [block.id for block in plan.hits] == [0]
    assert [block.id for block in plan.host_hits] == [2, 1]
    assert (plan.hit_tokens, plan.host_tokens, plan.blocks_needed) == (12, 8, 4)
    row = cache.start("a", [1] * 16)
    assert (row.table, row.hit_tokens, row.host_tokens) == ([0, 1, 2, 3], 12, 8)
    assert row.num_computed == 12
    outs, ins = cache.take_swaps()
    assert ins == [(2, 1), (1, 2)]  # block 3 of old goes on being on the host, in host block 0
    assert outs == [(1, 3), (2, 4), (3, 5)]
    assert host_refs(cache) == [0, 1, 1, 1, 1, 1]
    assert cache.refs() == [1, 3, 3, 2]  # block 1: the row, and both swaps
    cache.copies_done()
    assert cache.refs() == [1, 1, 1, 1]
    assert host_queue(cache) == [1, 2, 0, 3, 4, 5]
    cache.commit("a", 16)  # computed anew: the old last block on the host is free now
    assert host_queue(cache) == [0, 1, 2, 3, 4, 5]
    assert cache.host.pool.counts() == PoolCounts(free=3, cached=3, held=0)
    cache.release("a")
    assert cache.hit([2] * 13) == 12


def test_a_swap_counts_as_long_as_a_run_is_long_enough(make_cache):
    cache = make_cache(4, host_blocks=6, min_swap=3)
    cache.serve([1] * 16)
    cache.serve([2] * 9)  # evicts two blocks, and a third for its last token
    assert cache.hit([1] * 13) == 4  # two host blocks behind it are not worth a swap
    assert cache.hit([1] * 17) == 16
    row = cache.start("a", [1] * 13)
    assert (row.hit_tokens, row.host_tokens) == (4, 0)
    assert cache.take_swaps()[1] == []


def test_the_host_gives_way_from_the_end_of_its_oldest_prefix(make_cache):
    cache = make_cache(4, host_blocks=3)
    cache.serve([1] * 16)
    cache.serve([2] * 8)
    cache.serve([3] * 8)
    assert cache.host.evictions == 1
    assert host_queue(cache) == [1, 2, 0]
    assert cache.hit([1] * 17) == 12
    cache.serve([4] * 4)
    assert cache.host.evictions == 2
    assert cache.hit([1] * 17) == 8
    assert cache.hit([2] * 9) == 8


def test_where_all_of_the_host_is_in_use_a_block_is_forgotten_with_those_below_it(make_cache):
    cache = make_cache(4, host_blocks=2)
    cache.serve([1] * 16)
    assert cache.start("a", [2] * 12).table == [3, 2, 1]  # host blocks for two of them
    assert cache.hit([1] * 17) == 4
    assert cache.take_swaps() == ([(3, 0), (2, 1)], [])  # nobody will read them, but they are held
    assert cache.host.evictions == 2
    assert cache.host.pool.counts() == PoolCounts(free=0, cached=0, held=2)
    cache.copies_done()
    assert cache.host.pool.counts() == PoolCounts(free=2, cached=0, held=0)


def test_a_block_that_is_still_on_its_way_out_is_wanted_back(make_cache):
    cache = make_cache(6, host_blocks=6)
    cache.serve([1] * 12)
    cache.serve([2] * 12)
    cache.start("a", [3] * 8)  # evicts 2 and 1
    row = cache.start("b", [1] * 9)
    assert (row.table, row.hit_tokens, row.host_tokens) == ([0, 5, 4], 8, 4)
    assert cache.take_swaps() == ([(2, 0), (1, 1), (5, 2), (4, 3)], [(1, 5)])
    assert host_refs(cache)[:2] == [1, 2]  # host block 1 is written, then read
    cache.copies_done()
    assert host_queue(cache) == [1, 4, 5, 0, 2, 3]


def test_a_host_block_is_not_given_away_before_it_was_written(make_cache):
    cache = make_cache(4, host_blocks=2)
    cache.serve([1] * 8)
    cache.serve([2] * 16)
    assert cache.host.pool.counts() == PoolCounts(free=0, cached=2, held=0)
    cache.start("a", [1] * 5)  # swaps a block in, for which one goes out, and one more for the rest
    outs, ins = cache.take_swaps()
    written, read = [host for _, host in outs], [host for host, _ in ins]
    assert len(set(written + read)) == len(written + read)
    assert host_refs(cache) == [1, 1]
    assert cache.admit("b", cache.plan([3] * 12, cache.tenant)) is None


def test_a_row_released_before_its_step_stays_until_its_swaps_have_run(cache):
    cache.serve([1] * 16)
    cache.serve([2] * 12)
    cache.start("a", [1] * 13)
    cache.release("a")
    cache.release("a")
    assert cache.counts().held == 4
    with pytest.raises(KeyError):
        cache.table("a")
    cache.check()
    assert cache.take_swaps()[1] == [(2, 1), (1, 2)]
    cache.copies_done()
    assert cache.counts() == PoolCounts(free=1, cached=3, held=0)
    assert cache.queue() == [3, 2, 1, 0]
    assert cache.hit([1] * 13) == 12


def test_a_published_block_takes_the_place_of_an_equal_one_on_the_host(make_cache):
    cache = make_cache(4, host_blocks=6, min_swap=9)  # so all is computed anew
    cache.serve([1] * 16)
    cache.serve([2] * 16)
    assert cache.host.pool.counts() == PoolCounts(free=2, cached=4, held=0)
    cache.start("a", [1] * 8)
    cache.take_swaps()
    cache.copies_done()
    cache.commit("a", 8)
    assert cache.hit([1] * 17) == 8  # the others are still there, below it
    cache.host.min_swap = 2
    assert cache.hit([1] * 17) == 16


def test_retention_ends_where_a_block_is_evicted(cache, clock):
    cache.serve([1] * 16)
    assert cache.retain(cache.tenant, [1] * 8, 60) == 8
    cache.serve([2] * 16)  # softly: they are evicted after all
    assert cache.retained == 0
    assert cache.retain(cache.tenant, [1] * 8, 60) == 0  # host blocks are not retained
    assert cache.hit([1] * 17) == 16


@pytest.mark.parametrize("forget", ["drop", "reset"])
def test_host_blocks_are_forgotten_with_their_namespace(cache, forget):
    cache.serve([1] * 16)
    cache.serve([2] * 8, OTHER)
    assert cache.hit([1] * 17) == 16
    assert (cache.drop(cache.tenant) if forget == "drop" else cache.reset()) == 4 + 2 * (
        forget == "reset"
    )
    assert cache.hit([1] * 17) == 0
    assert cache.hit([2] * 9, OTHER) == 8 * (forget == "drop")
    assert cache.host.pool.counts() == PoolCounts(free=6, cached=0, held=0)


def test_a_drop_spares_the_swaps_under_way(cache):
    cache.serve([1] * 16)
    cache.serve([2] * 12)
    row = cache.start("a", [1] * 13)
    cache.reset()
    assert cache.take_swaps()[1] == [(2, 1), (1, 2)]  # the row goes on with its blocks
    cache.copies_done()
    cache.commit("a", 13)
    assert row.table == cache.table("a")
    assert cache.host.pool.counts() == PoolCounts(free=6, cached=0, held=0)
    cache.release("a")
    assert cache.counts() == PoolCounts(free=4, cached=0, held=0)


def test_a_preempted_request_gets_its_own_blocks_back_by_a_swap(cache):
    tokens = [1] * 9
    cache.run("a", tokens)
    cache.release("a")
    cache.serve([2] * 16)
    row = cache.start("a", tokens)
    assert (row.hit_tokens, row.host_tokens) == (8, 8)


def test_a_fork_shares_what_was_swapped_in(cache):
    cache.serve([1] * 8)
    cache.serve([2] * 16)
    cache.run("a", [1] * 9)
    row = cache.fork("a", "b", [1] * 9)
    assert row.table == cache.table("a")
    cache.take_swaps()
    cache.copies_done()
    cache.release("a")
    cache.release("b")
    assert cache.hit([1] * 9) == 8


def test_swaps_are_counted(cache):
    cache.serve([1] * 16)
    cache.serve([2] * 16)
    cache.serve([1] * 9)
    assert (cache.host.swap_outs.total, cache.host.swap_ins.total) == (7, 2)
