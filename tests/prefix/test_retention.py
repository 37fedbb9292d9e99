"""Soft retention: exact ids, queue order and times, with ten blocks of four tokens."""

from __future__ import annotations

import pytest

from ragcache.prefix.names import namespace_name, owner_name

OTHER = namespace_name(owner_name("model", "other"))


def scan(cache, first: int, count: int = 6) -> None:
    """Serve one-off prompts of two blocks each."""
    for token in range(first, first + count):
        cache.serve([token] * 8)


def test_a_retained_prefix_survives_one_off_prompts(cache):
    cache.serve([1] * 8)
    assert cache.retain(cache.tenant, [1] * 8, 300) == 8
    assert cache.retained == 2
    scan(cache, 10)
    assert cache.hit([1] * 9) == 8


def test_the_control_an_unretained_prefix_does_not(cache):
    cache.serve([1] * 8)
    scan(cache, 10)
    assert cache.hit([1] * 9) == 0


def test_retained_blocks_wait_behind_all_others_children_first(cache):
    cache.serve([1] * 8)
    cache.serve([2] * 8)
    cache.retain(cache.tenant, [1] * 8, 300)
    assert cache.queue() == [4, 5, 6, 7, 8, 9, 3, 2, 1, 0]
    cache.serve([3] * 8)
    assert cache.queue() == [6, 7, 8, 9, 3, 2, 5, 4, 1, 0]


@pytest.mark.parametrize(("tokens", "retained"), [(3, 0), (4, 4), (7, 4), (8, 8), (12, 8)])
def test_whole_published_blocks_are_retained(cache, tokens, retained):
    cache.serve([1] * 8)
    assert cache.retain(cache.tenant, [1] * tokens, 300) == retained
    assert cache.retained == retained // 4


def test_what_is_not_published_is_not_retained(cache, make_cache):
    cache.serve([1] * 8)
    assert cache.retain(cache.tenant, [2] * 8, 300) == 0
    assert cache.retain(OTHER, [1] * 8, 300) == 0
    assert cache.retain(cache.tenant, [1] * 8, 0) == 0
    unshared = make_cache(share=False)
    unshared.serve([1] * 8)
    assert unshared.retain(cache.tenant, [1] * 8, 300) == 0
    assert cache.retained == unshared.retained == 0


def test_a_retained_prefix_yields_before_an_admission_fails(cache):
    cache.serve([1] * 16)
    cache.retain(cache.tenant, [1] * 16, 300)
    assert cache.available == 10
    assert cache.start("a", [2] * 32).table == [4, 5, 6, 7, 8, 9, 3, 2]
    assert cache.kept() == {0: 400.0, 1: 400.0}
    cache.check()
    assert cache.start("b", [3] * 8).table == [1, 0]
    assert cache.retained == 0
    assert cache.evictions == 4


def test_held_blocks_are_retained_once_they_are_released(cache):
    cache.run("a", [1] * 16)
    assert cache.retain(cache.tenant, [1] * 8, 300) == 8
    assert cache.retained == 2
    cache.release("a")
    assert cache.queue() == [4, 5, 6, 7, 8, 9, 3, 2, 1, 0]


def test_a_parent_moves_behind_children_that_were_retained_before(cache):
    cache.serve([1] * 8)
    cache.serve([1] * 4 + [2] * 4)
    cache.retain(cache.tenant, [1] * 8, 300)
    cache.retain(cache.tenant, [1] * 4 + [2] * 4, 300)
    assert cache.queue()[-3:] == [1, 2, 0]


def test_after_its_ttl_a_prefix_is_evicted_like_others(cache, clock):
    cache.serve([1] * 8)
    cache.retain(cache.tenant, [1] * 8, 300)
    cache.serve([2] * 8)
    clock.now += 299.9
    cache.serve([3] * 8)
    assert cache.retained == 2
    clock.now += 0.1
    cache.serve([4] * 8)
    assert cache.retained == 0
    assert cache.queue() == [8, 9, 3, 2, 5, 4, 1, 0, 7, 6]  # most recently used when it expired
    scan(cache, 10)
    assert cache.hit([1] * 9) == 0


@pytest.mark.parametrize("path", ["admit", "grow", "retain", "release"])
def test_an_expiry_is_noticed_on_every_path(cache, clock, path):
    cache.serve([1] * 8)
    cache.retain(cache.tenant, [1] * 8, 300)
    cache.start("a", [2] * 4)
    plan = cache.plan([3] * 4, cache.tenant)
    clock.now += 300
    assert cache.retained == 2
    match path:
        case "admit":
            cache.admit("b", plan)
        case "grow":
            cache.grow("a", 5)
        case "retain":
            cache.retain(cache.tenant, [4] * 4, 300)
        case "release":
            cache.release("a")
    assert cache.retained == 0


def test_a_read_lets_the_ttl_start_anew(cache, clock):
    cache.serve([1] * 8)
    cache.retain(cache.tenant, [1] * 8, 300)
    clock.now += 200
    cache.serve([1] * 9)
    assert cache.kept() == {0: 600.0, 1: 600.0}
    clock.now += 200
    scan(cache, 10)
    assert cache.hit([1] * 9) == 8


def test_a_read_of_its_beginning_refreshes_only_that(cache, clock):
    cache.serve([1] * 8)
    cache.retain(cache.tenant, [1] * 8, 300)
    clock.now += 200
    cache.serve([1] * 4 + [2] * 4)
    assert cache.kept() == {0: 600.0, 1: 400.0}
    clock.now += 100
    scan(cache, 10)
    assert cache.hit([1] * 9) == 4


def test_a_read_after_the_ttl_refreshes_nothing(cache, clock):
    cache.serve([1] * 8)
    cache.retain(cache.tenant, [1] * 8, 300)
    clock.now += 300
    assert cache.serve([1] * 9) == 8
    assert cache.retained == 0


def test_planning_refreshes_nothing(cache, clock):
    cache.serve([1] * 8)
    cache.retain(cache.tenant, [1] * 8, 300)
    clock.now += 200
    cache.plan([1] * 9, cache.tenant)
    assert cache.kept() == {0: 400.0, 1: 400.0}


@pytest.mark.parametrize("long_first", [True, False])
def test_nested_prefixes_keep_their_own_ttl(cache, clock, long_first):
    cache.serve([1] * 16)
    marks = [([1] * 8, 3600), ([1] * 16, 300)]
    for tokens, ttl in marks if long_first else reversed(marks):
        cache.retain(cache.tenant, tokens, ttl)
    assert cache.kept() == {0: 3700.0, 1: 3700.0, 2: 400.0, 3: 400.0}
    clock.now += 300
    scan(cache, 10)
    assert cache.hit([1] * 17) == 8
    assert cache.retained == 2
    clock.now += 3300
    scan(cache, 20)
    assert cache.retained == 0
    assert cache.hit([1] * 17) == 0


def test_a_longer_ttl_behind_covers_what_lies_before(cache):
    cache.serve([1] * 16)
    cache.retain(cache.tenant, [1] * 8, 300)
    cache.retain(cache.tenant, [1] * 12, 3600)
    assert cache.kept() == dict.fromkeys([0, 1, 2], 3700.0)


def test_a_branch_ends_without_its_sibling(cache, clock):
    cache.serve([1] * 8)
    cache.serve([1] * 4 + [2] * 4)
    cache.retain(cache.tenant, [1] * 8, 300)
    cache.retain(cache.tenant, [1] * 4 + [2] * 4, 600)
    clock.now += 300
    scan(cache, 10, count=1)
    assert cache.kept() == {0: 700.0, 2: 700.0}
    clock.now += 300
    scan(cache, 20, count=1)
    assert cache.kept() == {}


def test_the_cap_cuts_a_prefix_to_its_leading_blocks(cache):
    cache.serve([1] * 32)
    assert cache.retain(cache.tenant, [1] * 32, 300) == 20
    assert sorted(cache.kept()) == [0, 1, 2, 3, 4]
    assert cache.queue() == [8, 9, 7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("share", "blocks"), [(0, 0), (0.25, 2), (1, 8)])
def test_the_cap_is_a_share_of_the_pool(make_cache, share, blocks):
    cache = make_cache(retain_share=share)
    cache.serve([1] * 32)
    assert cache.retain(cache.tenant, [1] * 32, 300) == blocks * 4


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_lies_between_none_and_all(make_cache, share):
    with pytest.raises(ValueError, match="not a share"):
        make_cache(retain_share=share)


def test_what_ends_first_gives_way_from_its_end(cache, clock):
    cache.serve([1] * 8)
    cache.serve([2] * 8)
    cache.retain(cache.tenant, [1] * 8, 600)
    cache.retain(cache.tenant, [2] * 8, 300)
    cache.serve([3] * 8)
    assert cache.retain(cache.tenant, [3] * 8, 3600) == 8
    assert sorted(cache.kept()) == [0, 1, 2, 4, 5]  # block 3 was the end of what ends first
    assert cache.queue() == [6, 7, 8, 9, 3, 1, 0, 2, 5, 4]


def test_a_new_retention_that_would_end_first_is_cut_itself(cache):
    cache.serve([1] * 16)
    cache.retain(cache.tenant, [1] * 16, 600)
    cache.serve([2] * 8)
    assert cache.retain(cache.tenant, [2] * 8, 300) == 4
    assert sorted(cache.kept()) == [0, 1, 2, 3, 4]
    assert cache.retain(cache.tenant, [3] * 8, 300) == 0


def test_room_is_made_over_several_retentions(cache):
    for token in range(5):
        cache.serve([token] * 4)
        cache.retain(cache.tenant, [token] * 4, 300 + token)
    cache.serve([9] * 16)
    assert cache.retain(cache.tenant, [9] * 16, 3600) == 16
    assert sorted(cache.kept().values()) == [404.0, *[3700.0] * 4]


def test_a_prefix_does_not_give_way_to_its_own_continuation(cache):
    cache.serve([1] * 32)
    cache.retain(cache.tenant, [1] * 16, 300)
    assert cache.retain(cache.tenant, [1] * 32, 300) == 20
    assert sorted(cache.kept()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("forget", ["drop", "reset"])
def test_dropping_ends_the_retention_too(cache, clock, forget):
    cache.serve([1] * 8)
    cache.serve([2] * 8, OTHER)
    cache.retain(cache.tenant, [1] * 8, 300)
    cache.retain(OTHER, [2] * 8, 600)
    cache.drop(cache.tenant) if forget == "drop" else cache.reset()
    assert cache.kept() == ({2: 700.0, 3: 700.0} if forget == "drop" else {})
    cache.check()
    clock.now += 300
    cache.serve([3] * 8)
    assert cache.retained == (2 if forget == "drop" else 0)


def test_a_block_that_was_evicted_is_not_retained_in_its_next_life(cache):
    cache.serve([1] * 8)
    cache.retain(cache.tenant, [1] * 8, 300)
    cache.serve([2] * 40)
    assert cache.retained == 0
    cache.serve([1] * 8)
    scan(cache, 10)
    assert cache.hit([1] * 9) == 0
