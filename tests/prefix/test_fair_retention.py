"""Retention is divided between owners, and costs the same however much is retained."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from ragcache.prefix.blocks import Block
from ragcache.prefix.ends import Ends
from ragcache.prefix.names import namespace_name, owner_name

A, B, C = (owner_name("model", tenant) for tenant in "abc")


def retain(cache, owner: bytes, token: int, blocks: int, ttl: float, salt: str | None = None):
    """Serve a prompt and retain it; returns how many blocks are."""
    namespace, tokens = namespace_name(owner, salt), [token] * 4 * blocks
    cache.serve(tokens, namespace)
    return cache.retain(namespace, tokens, ttl) // 4


def counts(cache) -> list[int]:
    cache.check()
    blocks = [block for block in cache._store.pool.blocks if block.keep_ttl]
    return [sum(block.keep_owner == owner for block in blocks) for owner in (A, B, C)]


@pytest.fixture
def cache(make_cache):
    """A cap of twelve blocks."""
    return make_cache(48, retain_share=0.25)


def test_an_owner_alone_has_the_whole_cap(cache):
    assert retain(cache, A, 1, 20, ttl=300) == 12


def test_the_longest_ttl_does_not_keep_others_from_their_share(cache):
    retain(cache, A, 1, 12, ttl=43_200)
    assert retain(cache, B, 2, 9, ttl=300) == 6
    assert counts(cache) == [6, 6, 0]


def test_nobody_is_displaced_within_the_fair_share(cache):
    retain(cache, A, 1, 6, ttl=300)
    retain(cache, B, 2, 6, ttl=600)
    assert retain(cache, B, 3, 2, ttl=43_200) == 2
    assert counts(cache) == [6, 6, 0]


def test_a_third_owner_takes_from_those_above_their_share_the_first_to_end(cache):
    for token in range(8):
        retain(cache, A, token, 1, ttl=600 + token)
    for token in range(4):
        retain(cache, B, token, 1, ttl=300)
    assert retain(cache, C, 1, 4, ttl=300) == 4
    assert counts(cache) == [4, 4, 4]
    assert sorted(cache.kept().values()) == [400.0] * 8 + [704.0, 705.0, 706.0, 707.0]


def test_several_above_their_share_give_way_in_the_order_of_their_ends(cache):
    for token, ttl in enumerate((300, 500, 700, 900, 1_100, 1_300)):
        retain(cache, A, token, 1, ttl)
        retain(cache, B, token, 1, ttl + 100)
    assert retain(cache, C, 1, 3, ttl=60) == 3
    assert counts(cache) == [4, 5, 3]
    assert sorted(cache.kept().values())[:5] == [160.0, 160.0, 160.0, 700.0, 800.0]


def test_beyond_its_share_an_owner_makes_room_from_its_own_only(cache):
    retain(cache, A, 1, 4, ttl=300)
    retain(cache, B, 2, 4, ttl=600)
    retain(cache, B, 3, 4, ttl=900)
    assert retain(cache, B, 4, 3, ttl=700) == 3  # at the cost of what ends at 600
    assert counts(cache) == [4, 8, 0]
    assert retain(cache, B, 5, 9, ttl=800) == 4  # the rest ends later
    assert counts(cache) == [4, 8, 0]


def test_all_salts_of_an_owner_count_together(cache):
    retain(cache, B, 1, 6, ttl=300)
    for salt in range(5):
        retain(cache, A, salt, 3, ttl=43_200, salt=str(salt))
    assert counts(cache) == [6, 6, 0]


def test_an_owner_whose_retentions_are_gone_has_no_share(cache, clock):
    retain(cache, A, 1, 6, ttl=300)
    retain(cache, B, 1, 6, ttl=600)
    cache.drop(A)
    assert retain(cache, B, 2, 12, ttl=900) == 12
    clock.now += 900
    assert retain(cache, C, 2, 12, ttl=900) == 12
    assert counts(cache) == [0, 0, 12]


def test_with_more_owners_than_blocks_those_that_came_first_stay(make_cache):
    cache = make_cache(48, retain_share=2 / 48)
    retained = [retain(cache, owner, 1, 1, ttl) for owner, ttl in ((A, 60), (B, 300), (C, 900))]
    assert retained == [1, 1, 0]


def calls(function: Callable[[], object]) -> int:
    """Count the calls, Python's and C's, that a function makes."""
    events = []
    sys.setprofile(lambda _frame, event, _arg: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def full_of_one_block_retentions(make_cache, size: int):
    cache = make_cache(4 * size, retain_share=0.25)
    cache.serve([0] * 4 * size, namespace_name(A))
    for token in range(1, size + 1):
        retain(cache, A, token, 1, ttl=300 + token)
    return cache


@pytest.mark.parametrize(("whole", "growth"), [(False, 1.2), (True, 4.2)])
def test_making_room_costs_in_proportion_to_what_gives_way(make_cache, whole, growth):
    """One block, or as many as are retained: not more because more is retained."""

    def cost(size: int) -> int:
        cache = full_of_one_block_retentions(make_cache, size)
        tokens = [0] * 4 * (size if whole else 1)
        return calls(lambda: cache.retain(namespace_name(A), tokens, 43_200))

    assert cost(400) < growth * cost(100)


@pytest.mark.parametrize("waits", [0, 302])
def test_an_expiry_costs_in_proportion_to_what_ends(make_cache, clock, waits):
    def cost(size: int) -> int:
        clock.now = 100.0
        cache = full_of_one_block_retentions(make_cache, size)
        clock.now += waits
        return calls(lambda: cache.release("nobody") or cache._retention.expire())

    assert cost(400) < 1.2 * cost(100)


def test_reads_do_not_let_the_order_of_ends_grow():
    ends, blocks = Ends(), [Block(i) for i in range(10)]
    for round_ in range(100):
        for block in blocks:
            ends.discard(block)
            block.keep_until = float(round_ + block.id)
            ends.add(block)
    assert len(ends) == 10
    assert len(ends._heap) <= 28
    assert ends.first() is blocks[0]
    blocks[0].keep_until += 50
    assert ends.first() is blocks[1]
