"""How long blocks live, lie idle and wait, to the second."""

from bisect import bisect_left

import pytest

from ragcache.types import Histogram


@pytest.fixture
def cache(make_cache):
    """Four blocks of four tokens."""
    return make_cache(4)


def observed(histogram: Histogram, *seconds: float) -> bool:
    counts = [0] * len(histogram.counts)
    for each in seconds:
        counts[bisect_left(histogram.bounds, each)] += 1
    return counts == histogram.counts and histogram.total == pytest.approx(sum(seconds))


def test_a_hit_tells_for_how_long_its_prefix_lay_idle(cache, clock):
    cache.serve([1] * 9)
    clock.now += 30
    assert cache.serve([1] * 10) == 8
    assert observed(cache.block_times().reuse_gap, 30)
    clock.now += 7
    assert cache.serve([1] * 5) == 4
    assert observed(cache.block_times().reuse_gap, 30, 7)


def test_a_prefix_that_is_in_use_was_not_idle(cache, clock):
    cache.run("first", [1] * 5)
    clock.now += 5
    assert cache.serve([1] * 6) == 4
    assert observed(cache.block_times().reuse_gap)


def test_an_eviction_ends_a_life_and_the_idle_part_of_it(cache, clock):
    cache.serve([1] * 5)
    clock.now += 40
    cache.serve([1] * 6)  # used anew
    clock.now += 9
    cache.serve([2] * 16)
    times = cache.block_times()
    assert observed(times.lifetime, 49)
    assert observed(times.idle_before_evict, 9)


def test_idle_time_goes_on_on_the_host(make_cache, clock):
    cache = make_cache(4, host_blocks=6)
    cache.serve([1] * 16)
    clock.now += 3
    cache.serve([2] * 16)
    clock.now += 4
    assert cache.serve([1] * 13) == 12
    assert observed(cache.block_times().reuse_gap, 7)


def test_what_was_told_does_not_change(cache, clock):
    before = cache.block_times()
    cache.serve([1] * 9)
    clock.now += 1
    cache.serve([1] * 9)
    assert observed(before.reuse_gap)
    assert observed(cache.block_times().reuse_gap, 1)
