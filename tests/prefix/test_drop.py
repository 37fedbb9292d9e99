"""Forgetting a tenant, or everything, while requests are running."""

from __future__ import annotations

import pytest

from ragcache.prefix.names import namespace_name, owner_name
from ragcache.types import PoolCounts

OTHER = namespace_name(owner_name("model", "other"))


def test_a_dropped_namespace_is_gone_and_the_others_stay(cache):
    cache.serve([1] * 9)
    cache.serve([2] * 9, OTHER)
    assert cache.drop(OTHER) == 2
    assert cache.counts() == PoolCounts(free=8, cached=2, held=0)
    assert cache.hit([2] * 9, OTHER) == 0
    assert cache.hit([1] * 9) == 8
    assert cache.tenants() == {cache.tenant}
    assert cache.drop(OTHER) == 0


def test_an_owner_is_dropped_with_all_its_salts_and_nobody_else(cache):
    owner = owner_name("model", "tenant")
    salts = [namespace_name(owner, salt) for salt in ("", "a", "b")]
    for namespace in (OTHER, cache.tenant, *salts):
        cache.serve([1] * 8, namespace)
    assert cache.drop(salts[1]) == 2
    assert cache.tenants() == {OTHER, cache.tenant, salts[0], salts[2]}
    cache.start("a", [2] * 8, salts[2])
    assert cache.drop(owner) == 6
    cache.commit("a", 8)
    assert cache.tenants() == {OTHER}
    assert cache.hit([1] * 9, OTHER) == 8


def test_dropped_blocks_are_taken_before_cached_ones(cache):
    cache.serve([1] * 8)
    cache.serve([2] * 8, OTHER)
    cache.drop(cache.tenant)
    assert cache.queue() == [1, 0, 4, 5, 6, 7, 8, 9, 3, 2]


def test_a_reset_forgets_everything(cache):
    cache.serve([1] * 9)
    cache.serve([2] * 9, OTHER)
    assert cache.reset() == 4
    assert cache.counts() == PoolCounts(free=10, cached=0, held=0)
    assert cache.tenants() == set()


def test_running_requests_keep_their_blocks_but_publish_no_more(cache):
    tokens = [1] * 10
    cache.run("a", tokens)
    assert cache.drop(cache.tenant) == 2
    assert cache.table("a") == [0, 1, 2]
    assert cache.published() == []
    tokens += [1, 1]
    assert cache.grow("a", 12)
    cache.commit("a", 12)
    assert cache.published() == []
    cache.release("a")
    assert cache.counts() == PoolCounts(free=10, cached=0, held=0)


@pytest.mark.parametrize("forget", ["drop", "reset"])
def test_a_prefill_that_spans_the_drop_is_not_found(cache, forget):
    cache.start("a", [1] * 8)  # nothing published yet: the namespace has no entry
    cache.drop(cache.tenant) if forget == "drop" else cache.reset()
    cache.commit("a", 8)
    assert cache.hit([1] * 9) == 0
    cache.run("b", [1] * 8)  # the control: what began after it is found
    assert cache.hit([1] * 9) == 8


def test_rows_from_before_and_after_a_drop_do_not_mix(cache):
    old, new = [1] * 8, [1] * 8
    cache.run("old", old)
    cache.drop(cache.tenant)
    assert cache.run("new", new).table == [2, 3]
    old += [1] * 4
    cache.grow("old", 12)
    cache.commit("old", 12)
    assert cache.published() == [2, 3]
    cache.release("old")
    assert cache.hit([1] * 13) == 8


def test_a_fork_of_a_dropped_row_publishes_no_more_either(cache):
    cache.run("a", [1] * 6)
    cache.drop(cache.tenant)
    branch = [1] * 6
    cache.fork("a", "b", branch)
    branch += [2, 2]
    cache.grow("b", 8)
    cache.take_copies()
    cache.copies_done()
    cache.commit("b", 8)
    assert cache.published() == []


def test_a_plan_from_before_the_drop_is_made_again(cache):
    cache.serve([1] * 8)
    plan = cache.plan([1] * 9, cache.tenant)
    cache.drop(cache.tenant)
    assert cache.admit("a", plan).hit_tokens == 0
