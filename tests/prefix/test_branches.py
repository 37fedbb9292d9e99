"""What prompts share most: hits per block, branches of the tree, and what is left of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ragcache.prefix.branches import hottest
from ragcache.prefix.names import OWNER_BYTES, block_keys, block_name, namespace_name, owner_name

OWNER = owner_name("model", "tenant")
TENANT = namespace_name(OWNER)
OTHER = namespace_name(owner_name("model", "other"))
SYSTEM = list(range(100, 112))  # three blocks


@pytest.fixture
def cache(make_cache):
    return make_cache(60)


def ask(cache, tokens, tenant=TENANT):
    """Send one prompt through, as the engine does."""
    row = cache.run("asked", tokens, tenant)
    cache.count_hit("asked")
    cache.release("asked")
    return row.hit_tokens


def name_of(tokens, namespace=TENANT, block_size=4):
    """The name of the last block of a prefix."""
    name = namespace
    for key in block_keys(tokens, 0, len(tokens) // block_size, block_size):
        name = block_name(name, key)
    return name


def test_what_all_prompts_share_comes_before_where_they_part(cache, clock):
    for document in (1, 1, 1, 2, 2, 3):
        ask(cache, [*SYSTEM, *[document] * 8, 0])
        clock.now += 1
    shared, first, second = cache.hottest(OWNER, 10)
    assert (shared.name, shared.parent) == (name_of(SYSTEM), None)
    assert (shared.tokens, shared.hits, shared.hit_tokens) == (12, 5, 60)
    assert (first.name, first.parent) == (name_of([*SYSTEM, *[1] * 8]), shared.name)
    assert (first.tokens, first.hits, first.hit_tokens) == (20, 2, 16)
    assert (second.tokens, second.hits, second.hit_tokens) == (20, 1, 8)
    assert [each.published_at for each in (shared, first, second)] == [100, 100, 103]


def test_nothing_is_hot_before_anything_was_hit(cache):
    ask(cache, SYSTEM)
    assert cache.hottest(OWNER, 10) == []


def test_a_long_conversation_is_a_few_branches(cache):
    hit_tokens = sum(ask(cache, list(range(4 * turn + 1))) for turn in range(1, 32))
    assert hit_tokens == sum(range(4, 124, 4))
    branches = cache.hottest(OWNER, 50)
    assert [each.hits for each in branches] == [16, 8, 4, 2, 1]
    assert [each.parent for each in branches[1:]] == [each.name for each in branches[:-1]]
    assert sum(each.hit_tokens for each in branches) == hit_tokens


def test_the_tokens_of_all_branches_are_all_hit_tokens(make_cache):
    rng = random.Random(1)
    cache = make_cache(1000)
    hit_tokens = sum(
        ask(cache, [rng.randrange(2) for _ in range(rng.randrange(1, 40))]) for _ in range(200)
    )
    assert cache.evictions == 0
    branches = cache.hottest(OWNER, 400)
    assert sum(each.hit_tokens for each in branches) == hit_tokens > 0
    assert [each.hits for each in branches] == sorted((b.hits for b in branches), reverse=True)
    listed = {None}
    for each in branches:
        assert each.parent in listed
        listed.add(each.name)


def test_a_branch_is_forgotten_with_its_blocks_and_begins_anew(make_cache):
    cache = make_cache(8)
    for _ in range(3):
        ask(cache, [*SYSTEM, 0])
    assert [each.hits for each in cache.hottest(OWNER, 10)] == [2]
    ask(cache, list(range(24)))  # six blocks: the end of the old prefix goes first
    (left,) = cache.hottest(OWNER, 10)
    assert (left.name, left.tokens, left.hits) == (name_of(SYSTEM[:8]), 8, 2)
    ask(cache, list(range(50, 82)))
    assert cache.hottest(OWNER, 10) == []
    for _ in range(2):
        ask(cache, [*SYSTEM, 0])
    assert [each.hits for each in cache.hottest(OWNER, 10)] == [1]


def test_hits_go_along_to_the_host_and_back(make_cache, clock):
    cache = make_cache(4, host_blocks=6)
    for _ in range(3):
        ask(cache, [*SYSTEM, 0])
        clock.now += 1
    before = cache.hottest(OWNER, 10)
    ask(cache, list(range(13)))
    assert cache.host.pool.counts().cached == 3
    assert cache.hottest(OWNER, 10) == before
    assert ask(cache, [*SYSTEM, 0]) == 12
    (back,) = cache.hottest(OWNER, 10)
    assert (back.name, back.hits, back.published_at) == (before[0].name, 3, 100)


def test_retention_is_told_of_the_end_of_a_branch(cache):
    for _ in range(2):
        ask(cache, [*SYSTEM, 0])
    cache.retain(TENANT, SYSTEM[:8], ttl=300)
    assert cache.hottest(OWNER, 1)[0].kept_until is None
    cache.retain(TENANT, SYSTEM, ttl=60)
    assert cache.hottest(OWNER, 1)[0].kept_until == 160


def test_owners_see_their_own_whatever_the_salt(cache):
    salted = namespace_name(OWNER, "salt")
    for tenant, times in ((TENANT, 4), (salted, 3), (OTHER, 2)):
        for _ in range(times):
            ask(cache, [*SYSTEM, 0], tenant)
    mine = cache.hottest(OWNER, 10)
    assert [(each.name, each.hits) for each in mine] == [
        (name_of(SYSTEM), 3),
        (name_of(SYSTEM, salted), 2),
    ]
    assert [each.hits for each in cache.hottest(OTHER[:OWNER_BYTES], 10)] == [1]
    cache.drop(OWNER)
    assert cache.hottest(OWNER, 10) == []
    assert len(cache.hottest(OTHER[:OWNER_BYTES], 10)) == 1


def test_a_prompt_that_resumes_is_not_counted_twice(cache):
    ask(cache, [*SYSTEM, 0])
    for resumes in (False, True):
        cache.run("r", [*SYSTEM, 0])
        if not resumes:
            cache.count_hit("r")
        cache.release("r")
    assert [each.hits for each in cache.hottest(OWNER, 10)] == [1]


def test_a_walk_ends_after_as_many_nodes_as_it_may_see(make_cache):
    cache = make_cache(400)
    for document in range(100):
        for _ in range(2):
            ask(cache, [*SYSTEM, *[document] * 4, 0])
    index, seen = cache._store.index, Counter()
    for most in (2, 50, 1000):
        seen[most] = len(hottest(index, OWNER, 4, 400, most))
    assert seen == {2: 1, 50: 48, 1000: 101}
