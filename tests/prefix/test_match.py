"""What is found, and what must not be."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from ragcache.prefix.names import namespace_name, owner_name


@pytest.mark.parametrize(
    ("length", "hit_tokens"),
    [(0, 0), (1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)],
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(cache, length, hit_tokens):
    tokens = list(range(13))
    cache.serve(tokens)
    plan = cache.plan(tokens[:length], cache.tenant)
    assert plan.hit_tokens == hit_tokens
    assert [block.id for block in plan.hits] == list(range(hit_tokens // 4))
    assert plan.blocks_needed == -(-length // 4)  # cached hits leave the queue, too


def test_a_hit_that_is_held_costs_no_block(cache):
    tokens = list(range(9))
    cache.run("a", tokens)
    assert cache.plan(tokens, cache.tenant).blocks_needed == 1


@pytest.mark.parametrize("length", [1, 4, 5, 8])
def test_a_prompt_of_any_length_is_covered(cache, length):
    row = cache.run("a", list(range(length)))
    assert row.table == cache.table("a") == list(range(-(-length // 4)))
    assert cache.published() == list(range(length // 4))


def test_an_empty_prompt_holds_nothing(cache):
    assert cache.run("a", []).table == []
    assert cache.counts().held == 0


def test_the_longest_common_prefix_counts_wherever_it_ends(cache):
    shared = list(range(10))
    cache.serve([*shared, 90, 91, 92])
    assert cache.hit([*shared, 80]) == 8
    assert cache.hit(shared) == 8
    assert cache.hit([0, 1, 2, 3, 4, 77, 6, 7, 8]) == 4
    assert cache.hit([77, *shared]) == 0


def test_a_namespace_finds_only_its_own_blocks(cache):
    tokens = list(range(9))
    other = namespace_name(owner_name("model", "other"))
    cache.serve(tokens)
    assert cache.hit(tokens, other) == 0
    assert cache.serve(tokens, other) == 0
    assert cache.hit(tokens, other) == cache.hit(tokens) == 8


def test_tokens_are_never_run_together(cache):
    cache.serve([1, 23, 1, 1, 0])
    assert cache.hit([12, 3, 1, 1, 0]) == 0
    assert cache.hit([1, 23, 1, 1, 0]) == 4


def test_order_matters(cache):
    cache.serve([1, 2, 3, 4, 0])
    hits = [cache.hit([*order, 0]) for order in permutations([1, 2, 3, 4])]
    assert hits == [4] + [0] * 23


def test_a_block_is_found_only_below_its_own_parent(cache):
    cache.serve([1, 1, 1, 1, 5, 5, 5, 5, 0])
    cache.serve([2, 2, 2, 2, 6, 6, 6, 6, 0])
    assert cache.hit([1, 1, 1, 1, 6, 6, 6, 6, 0]) == 4
    assert cache.hit([5, 5, 5, 5, 0]) == 0
    assert cache.hit([2, 2, 2, 2, 6, 6, 6, 6, 0]) == 8


def test_one_differing_token_is_never_a_match(make_cache):
    rng = random.Random(0)
    cache = make_cache(num_blocks=10_001)
    prompts = [[rng.randrange(50_000) for _ in range(4)] for _ in range(10_000)]
    for prompt in prompts:
        cache.serve([*prompt, 0])
    for prompt in prompts:
        changed = prompt.copy()
        changed[rng.randrange(4)] ^= 1 << rng.randrange(16)
        assert cache.hit([*changed, 0]) == 0
        assert cache.hit([*prompt, 0]) == 4


def test_planning_changes_nothing(cache):
    cache.serve([1] * 9)
    cache.serve([2] * 9)
    before = cache.queue(), cache.refs(), cache.counts(), cache.generation
    cache.plan([1] * 9, cache.tenant)
    cache.plan([3] * 9, namespace_name(owner_name("unknown")))
    assert (cache.queue(), cache.refs(), cache.counts(), cache.generation) == before


def test_without_sharing_everything_works_and_nothing_is_found(make_cache):
    cache = make_cache(share=False)
    tokens = list(range(9))
    cache.run("a", tokens)
    assert cache.published() == []
    cache.fork("a", "b", tokens.copy())
    cache.release("a")
    cache.release("b")
    assert cache.hit(tokens) == 0
    assert (cache.counts().free, cache.counts().cached) == (10, 0)
