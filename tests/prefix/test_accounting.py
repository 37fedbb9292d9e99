"""Exact block ids, reference counts and queue order, with ten blocks of four tokens."""

from __future__ import annotations

import random

import pytest

from ragcache.prefix.names import namespace_name, owner_name
from ragcache.types import PoolCounts


def test_a_fresh_pool_lends_ascending_ids(cache):
    assert cache.start("a", [1] * 12).table == [0, 1, 2]
    assert cache.start("b", [2] * 5).table == [3, 4]
    assert cache.queue() == [5, 6, 7, 8, 9]
    assert cache.refs() == [1] * 5 + [0] * 5
    assert cache.counts() == PoolCounts(free=5, cached=0, held=5)


def test_a_row_is_released_tail_first_with_unpublished_blocks_in_front(cache):
    cache.run("a", [1] * 10)  # blocks 0 and 1 are published, 2 is partly filled
    cache.release("a")
    assert cache.queue() == [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]
    assert cache.counts() == PoolCounts(free=8, cached=2, held=0)


def test_a_hit_is_taken_out_of_the_middle_of_the_queue(cache):
    cache.serve([1] * 8)
    cache.serve([2] * 8)
    assert cache.queue() == [4, 5, 6, 7, 8, 9, 1, 0, 3, 2]
    row = cache.run("a", [1] * 5)
    assert (row.table, row.hit_tokens) == ([0, 4], 4)
    assert cache.queue() == [5, 6, 7, 8, 9, 1, 3, 2]
    cache.release("a")
    assert cache.queue() == [4, 5, 6, 7, 8, 9, 1, 3, 2, 0]


def test_the_least_recently_used_prefix_is_evicted_from_its_end(cache):
    cache.serve([1] * 16)  # blocks 0 to 3
    cache.serve([2] * 16)  # blocks 4 to 7
    assert cache.queue() == [8, 9, 3, 2, 1, 0, 7, 6, 5, 4]
    assert cache.start("a", [3] * 16).table == [8, 9, 3, 2]
    assert cache.evictions == 2
    assert cache.hit([1] * 17) == 8
    assert cache.hit([2] * 17) == 16


def test_a_prefix_used_by_many_outlives_its_branches(cache):
    for last in range(3):
        cache.serve([1] * 4 + [2 + last] * 4)
    assert cache.published() == [0, 1, 2, 3]
    cache.run("a", [9] * 36)
    assert cache.evictions == 3
    assert cache.published() == sorted([0, *cache.table("a")])
    assert cache.hit([1] * 4 + [2]) == 4


def test_eviction_takes_neither_held_blocks_nor_their_parents(cache):
    cache.run("a", [1] * 12)
    cache.serve([1] * 8 + [2] * 8)
    assert cache.admit("b", cache.plan([3] * 29, cache.tenant)) is None
    assert len(cache.start("b", [3] * 28).table) == 7
    assert cache.table("a") == [0, 1, 2]
    assert cache.hit([1] * 13) == 12
    assert cache.hit([1] * 8 + [2] * 8) == 8


def test_admission_is_all_or_nothing(cache):
    cache.serve([1] * 8)
    cache.run("a", [2] * 20)
    before = cache.queue(), cache.refs(), cache.generation
    plan = cache.plan([1] * 24, cache.tenant)
    assert (plan.hit_tokens, plan.blocks_needed, cache.available) == (8, 6, 5)
    assert cache.admit("b", plan) is None
    assert (cache.queue(), cache.refs(), cache.generation) == before
    assert cache.start("b", [1] * 20).hit_tokens == 8
    assert cache.available == 0


def test_a_plan_is_made_again_when_its_hits_are_gone(cache):
    cache.serve([1] * 8)
    plan = cache.plan([1] * 9, cache.tenant)
    cache.serve([2] * 40)
    assert cache.generation != plan.generation
    row = cache.admit("a", plan)
    assert (plan.hit_tokens, row.hit_tokens, row.num_computed) == (8, 0, 0)
    assert len(row.table) == 3


def test_a_plan_is_made_again_when_more_can_be_found(cache):
    plan = cache.plan([1] * 9, cache.tenant)
    cache.serve([1] * 8)
    assert cache.admit("a", plan).hit_tokens == 8


def test_a_plan_whose_hits_others_let_go_is_counted_afresh(cache):
    cache.run("a", [1] * 8)
    plan = cache.plan([1] * 40, cache.tenant)
    assert plan.blocks_needed == 8
    cache.start("b", [2] * 4)
    cache.release("a")  # the hits are in the queue now, and count
    assert plan.generation == cache.generation
    assert cache.available == 9
    assert cache.admit("c", plan) is None


def test_an_id_is_admitted_once_at_a_time(cache):
    cache.run("a", [1] * 4)
    with pytest.raises(ValueError, match="already running"):
        cache.admit("a", cache.plan([2] * 4, cache.tenant))
    with pytest.raises(ValueError, match="already running"):
        cache.fork("a", "a", [1] * 4)
    cache.release("a")
    assert cache.start("a", [2] * 4).table == [1]


def test_release_is_idempotent_and_ignores_unknown_ids(cache):
    cache.run("a", [1] * 8)
    cache.release("unknown")
    assert cache.refs() == [1, 1] + [0] * 8
    cache.release("a")
    cache.release("a")
    assert cache.queue() == [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]
    with pytest.raises(KeyError):
        cache.table("a")


def test_grow_appends_blocks_only_when_the_last_is_full(cache):
    row = cache.run("a", [1] * 7)
    assert cache.grow("a", 8)
    assert row.table == [0, 1]
    assert cache.grow("a", 9)
    assert row.table == [0, 1, 2]
    assert cache.grow("a", 5)  # covered long since
    assert cache.grow("a", 40)
    assert row.table == list(range(10))


def test_grow_without_room_changes_nothing(cache):
    row = cache.run("a", [1] * 8)
    cache.run("b", [2] * 28)
    before = cache.queue(), cache.refs(), row.table.copy(), row.num_tokens
    assert not cache.grow("a", 13)
    assert (cache.queue(), cache.refs(), row.table, row.num_tokens) == before
    assert cache.grow("a", 12)


def test_only_full_and_written_blocks_are_published(cache):
    tokens = [1] * 10
    cache.start("a", tokens)
    assert cache.published() == []
    cache.commit("a", 3)
    assert cache.published() == []
    cache.commit("a", 9)
    assert cache.published() == [0, 1]
    tokens += [1, 1]
    cache.grow("a", 12)
    cache.commit("a", 11)  # the last token was sampled, but is not computed
    assert cache.published() == [0, 1]
    cache.commit("a", 12)
    assert cache.published() == [0, 1, 2]


@pytest.mark.parametrize("num_computed", [3, 9])
def test_commit_refuses_what_cannot_be(cache, num_computed):
    tokens = [1] * 8
    cache.start("a", tokens)
    cache.commit("a", 4)
    tokens.append(1)
    with pytest.raises(ValueError, match=f"{num_computed} tokens"):
        cache.commit("a", num_computed)
    with pytest.raises(KeyError):
        cache.commit("unknown", 4)


def test_an_aborted_prefill_leaves_its_written_blocks_only(cache):
    cache.start("a", [1] * 16)
    cache.commit("a", 10)
    cache.release("a")
    assert cache.queue() == [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]
    assert cache.hit([1] * 17) == 8


def test_equal_prompts_in_flight_end_on_one_copy(cache):
    prompt = [1] * 10
    one, other = cache.start("a", prompt), cache.start("b", prompt.copy())
    assert (one.table, other.table) == ([0, 1, 2], [3, 4, 5])
    cache.commit("a", 10)
    table = other.table
    cache.commit("b", 10)
    assert table == cache.table("b") == [0, 1, 5]  # rewritten in place: never the freed blocks
    assert cache.refs() == [2, 2, 1, 0, 0, 1, 0, 0, 0, 0]
    assert cache.queue() == [4, 3, 6, 7, 8, 9]
    cache.start("c", [2] * 24)
    assert not set(cache.table("c")) & set(table)
    cache.release("a")
    assert cache.refs()[:2] == [1, 1]


def test_a_duplicate_of_an_evictable_block_takes_it_out_of_the_queue(cache):
    cache.start("a", [1] * 5)
    cache.serve([1] * 5)
    assert cache.queue()[-1] == 2
    cache.commit("a", 5)
    assert cache.table("a") == [2, 1]
    assert cache.queue() == [0, 3, 4, 5, 6, 7, 8, 9]


def test_a_preempted_request_finds_its_own_blocks_again(cache):
    tokens = [1] * 9
    cache.run("a", tokens)
    tokens.append(2)
    cache.release("a")
    row = cache.start("a", tokens)
    assert (row.table, row.hit_tokens) == ([0, 1, 2], 8)


def test_the_index_never_outgrows_the_pool(cache):
    rng = random.Random(0)
    for i in range(3_000):
        cache.serve(
            [rng.randrange(1_000) for _ in range(9)], namespace_name(owner_name(str(i % 50)))
        )
    assert len(cache.published()) <= 10
    assert len(cache.tenants()) <= 10
    assert cache.evictions > 5_000
