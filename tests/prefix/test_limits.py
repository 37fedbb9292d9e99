"""Requests that may hit, or publish, only the beginning of their prompt."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("limit", "hit_tokens"), [(None, 8), (99, 8), (8, 8), (7, 4), (4, 4), (3, 0), (0, 0)]
)
def test_no_more_than_the_limit_is_hit(cache, limit, hit_tokens):
    cache.serve([1] * 12)
    plan = cache.plan([1] * 12, cache.tenant, limit)
    assert plan.hit_tokens == hit_tokens
    assert cache.admit("a", plan).hit_tokens == hit_tokens


def test_a_plan_that_is_made_again_keeps_its_limit(cache):
    plan = cache.plan([1] * 12, cache.tenant, limit=4)
    cache.serve([1] * 12)
    assert cache.generation != plan.generation
    assert cache.admit("a", plan).hit_tokens == 4
    assert cache.start("b", [1] * 12).hit_tokens == 8


@pytest.mark.parametrize(
    ("limit", "published"), [(None, 12), (99, 12), (12, 12), (9, 8), (3, 0), (0, 0)]
)
def test_no_more_than_the_limit_is_published(cache, limit, published):
    cache.admit("a", cache.plan([1] * 14, cache.tenant), publish_limit=limit)
    for computed in (5, 10, 14):  # in chunks
        cache.commit("a", computed)
    assert len(cache.published()) == published // 4
    cache.check()
    cache.release("a")
    assert cache.hit([1] * 14) == published


def test_a_fork_publishes_up_to_the_same_limit(cache):
    tokens = [1] * 8
    cache.admit("a", cache.plan(tokens, cache.tenant), publish_limit=4)
    cache.commit("a", 8)
    branch = tokens.copy()
    cache.fork("a", "b", branch)
    branch += [2] * 4
    cache.grow("b", 12)
    cache.commit("b", 12)
    assert cache.published() == [0]


def test_a_prompt_that_is_computed_anew_goes_over_to_what_is_published(cache):
    cache.serve([1] * 8)
    row = cache.admit("a", cache.plan([1] * 12, cache.tenant, limit=0))
    assert (row.table, row.hit_tokens) == ([2, 3, 4], 0)
    cache.commit("a", 12)
    assert row.table == [0, 1, 4]
    cache.release("a")
    assert cache.hit([1] * 13) == 12
