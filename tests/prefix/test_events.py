"""What is told about blocks: by name, in order, and whether they are on the host."""

from __future__ import annotations

import pytest
from mirror import Mirror

from ragcache.prefix.names import block_names, namespace_name, owner_name

OTHER = namespace_name(owner_name("model", "other"))


@pytest.fixture
def mirror() -> Mirror:
    return Mirror()


def test_blocks_are_named_after_their_namespace_and_tokens(make_cache, mirror):
    cache = make_cache(sink=mirror)
    cache.serve(range(9))
    names = block_names(cache.tenant, range(9), 4)
    assert mirror.told == [(name, False) for name in names]
    cache.serve([*range(4), 9, 9, 9, 9])
    cache.serve(range(8), OTHER)
    new = [block_names(cache.tenant, [*range(4), 9, 9, 9, 9], 4)[1]]
    new += block_names(OTHER, range(8), 4)
    assert mirror.told[2:] == [(name, False) for name in new]
    assert len(mirror.on_host) == 5


def test_what_is_computed_twice_is_told_once(make_cache, mirror):
    cache = make_cache(sink=mirror)
    cache.start("a", range(8))
    cache.start("b", range(8))
    cache.commit("a", 8)
    cache.commit("b", 8)
    assert len(mirror.told) == 2


def test_children_are_evicted_before_their_parents(make_cache, mirror):
    cache = make_cache(3, sink=mirror)
    cache.serve(range(12))
    first, second, third = block_names(cache.tenant, range(12), 4)
    cache.start("a", [5] * 7)
    assert mirror.told[3:] == [(third, None), (second, None)]
    assert mirror.on_host == {first: False}


def test_a_way_to_the_host_and_back_is_told(make_cache, mirror):
    cache = make_cache(2, host_blocks=4, sink=mirror)
    cache.serve(range(8))
    first, second = block_names(cache.tenant, range(8), 4)
    cache.serve([5] * 7)
    assert mirror.on_host == {first: True, second: True} | dict.fromkeys(
        block_names(cache.tenant, [5] * 4, 4), False
    )
    cache.run("a", range(5))  # takes the first from the host
    assert mirror.on_host[first] is False
    assert mirror.on_host[second] is True


def test_what_hangs_below_a_forgotten_block_goes_first(make_cache, mirror):
    cache = make_cache(4, host_blocks=2, sink=mirror)
    cache.serve([1] * 16)
    names = block_names(cache.tenant, [1] * 16, 4)
    cache.start("a", [2] * 12)  # the host has room for two of three, and both are held there
    assert mirror.told[4:] == [
        (names[3], True),
        (names[2], True),
        (names[3], None),
        (names[2], None),
        (names[1], None),
    ]


@pytest.mark.parametrize("everything", [True, False])
def test_a_dropped_tree_goes_children_first(make_cache, mirror, everything):
    cache = make_cache(sink=mirror)
    cache.serve([1] * 8)
    cache.serve([1] * 4 + [2] * 8)
    cache.serve([3] * 4, OTHER)
    stored = [name for name, _ in mirror.told]
    assert (cache.reset() if everything else cache.drop(cache.tenant)) == 5 - (not everything)
    parents = {
        child: parent
        for tokens in ([1] * 8, [1] * 4 + [2] * 8)
        for parent, child in zip(
            block_names(cache.tenant, tokens, 4),
            block_names(cache.tenant, tokens, 4)[1:],
            strict=False,
        )
    }
    gone = [name for name, _ in mirror.told[5:]]
    assert sorted(gone) == sorted(stored if everything else stored[:4])
    assert all(gone.index(child) < gone.index(parent) for child, parent in parents.items())


def test_a_cache_that_shares_nothing_tells_nothing(make_cache, mirror):
    cache = make_cache(share=False, sink=mirror)
    cache.serve(range(9))
    assert mirror.told == []
