"""`check` notices each kind of damage."""

from __future__ import annotations

import pytest

from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.names import namespace_name, owner_name

NAMESPACE = namespace_name(owner_name("model"))


@pytest.fixture
def damaged() -> PrefixCache:
    """A cache to be damaged: blocks 0 and 1 cached, 2 and 3 held by "a", the others free."""
    cache = PrefixCache(6, 4)
    for request_id, token in (("b", 1), ("a", 2)):
        cache.admit(request_id, cache.plan([token] * 8, NAMESPACE))
        cache.commit(request_id, 8)
    cache.release("b")
    cache.check()
    return cache


def expect(cache: PrefixCache, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        cache.check()


def test_a_reference_without_owner(damaged):
    damaged._store.pool.blocks[2].ref_count += 1
    expect(damaged, "block 2 has 1 owners")


def test_a_held_block_in_the_queue(damaged):
    block, end = damaged._store.pool.blocks[2], damaged._store.pool._end
    block.prev, block.next = end.prev, end
    block.prev.next = end.prev = block
    expect(damaged, "block 2 is held, yet in the queue")


def test_a_block_lost_from_the_queue(damaged):
    block = damaged._store.pool.blocks[5]
    block.prev.next, block.next.prev = block.next, block.prev
    expect(damaged, "3 queued, 4 counted")


def test_a_broken_back_link(damaged):
    damaged._store.pool.blocks[5].prev = damaged._store.pool.blocks[0]
    expect(damaged, "not linked back to")


def test_a_parent_before_its_child_in_the_queue(damaged):
    parent = damaged._store.pool.blocks[0]
    damaged._store.pool.hold([parent])
    parent.parent, kept = None, parent.parent  # goes to the front, like an unpublished block
    damaged._store.pool.release([parent])
    parent.parent = kept
    expect(damaged, "block 0 would be evicted before its children")


def test_a_wrong_count(damaged):
    damaged._store.pool.free -= 1
    damaged._store.pool.cached += 1
    expect(damaged, "2 blocks are cached, 3 counted")


def test_an_entry_for_a_block_that_left(damaged):
    damaged._store.pool.blocks[1].parent = None
    damaged._store.pool.free += 1
    damaged._store.pool.cached -= 1
    expect(damaged, "block 1 is not the child its parent knows")


def test_an_entry_that_is_missing(damaged):
    damaged._store.pool.blocks[0].children.clear()
    expect(damaged, "block 1 is published but not in the tree")


def test_an_empty_namespace(damaged):
    damaged._store.index.root(namespace_name(owner_name("empty")))
    expect(damaged, "empty namespace")


def test_a_row_with_blocks_of_other_tokens(damaged):
    damaged._rows["a"].tokens[5] = 9
    expect(damaged, "block 3 is not what its row's tokens say")


def test_a_row_that_is_too_short(damaged):
    damaged._rows["a"].num_tokens = 9
    expect(damaged, "2 blocks do not cover 9 tokens")


def test_a_retained_block_among_the_others(damaged):
    damaged._store.pool.blocks[1].keep_ttl = 1.0
    expect(damaged, "block 0 is in the wrong part of the queue")


@pytest.fixture
def retained(damaged) -> PrefixCache:
    """The same, with the cached blocks 0 and 1 retained."""
    assert damaged.retain(NAMESPACE, [1] * 8, 60) == 8
    damaged.check()
    return damaged


def test_a_wrong_count_of_retained_blocks(retained):
    retained._store.retention.count = 1
    expect(retained, "1 blocks are counted as retained")


def test_more_retained_blocks_than_the_cap(retained):
    retained._store.retention.cap = 1
    expect(retained, "2 blocks are retained")


def test_a_child_retained_longer_than_its_parent(retained):
    retained._store.pool.blocks[1].keep_until += 1
    expect(retained, "block 1 is retained longer than its parent")


@pytest.mark.parametrize("of_all", [True, False])
def test_an_end_that_is_missing_or_none(retained, of_all):
    retention = retained._store.retention
    (owner,) = retention.owners.values()
    ends = retention.ends if of_all else owner.ends
    ends.add(retained._store.pool.blocks[0])
    expect(retained, "2 blocks are known as ends")
    for block in retained._store.pool.blocks[:2]:
        ends.discard(block)
    expect(retained, "block 1 is an end, but not known as one")


def test_a_wrong_count_for_an_owner(retained):
    (owner,) = retained._store.retention.owners.values()
    owner.count = 1
    expect(retained, "1 blocks are counted as retained for an owner")


def test_a_block_that_is_retained_for_an_unknown_owner(retained):
    retained._store.pool.blocks[0].keep_owner = b"nobody"
    expect(retained, "an owner is not known to retain, or is")


def test_a_wrong_count_of_retained_children(retained):
    retained._store.pool.blocks[0].retained_children = 0
    expect(retained, "block 0 counts 0 retained children")


def test_a_retention_that_would_not_be_seen_to_end(retained):
    assert retained.retain(NAMESPACE, [2] * 4, 120) == 4
    retained._store.pool.blocks[2].keep_until -= 100
    expect(retained, "block 2 would not be seen to end")


@pytest.fixture
def hosted() -> PrefixCache:
    """A cache to be damaged: host blocks 1 and 0, parent and child, were device blocks 0 and 1."""
    cache = PrefixCache(2, 4, host_blocks=3)
    for token in (1, 2):
        cache.admit(token, cache.plan([token] * 8, NAMESPACE))
        cache.take_swaps()
        cache.copies_done()
        cache.commit(token, 8)
        cache.release(token)
    cache.check()
    return cache


def test_a_host_reference_without_owner(hosted):
    hosted.host.pool.blocks[2].ref_count += 1
    expect(hosted, "host block 2 has 0 owners")


def test_a_host_parent_before_its_child_in_the_queue(hosted):
    hosted.host.pool.requeue([hosted.host.pool.blocks[0]])
    expect(hosted, "host block 1 would be evicted before its children")


def test_a_wrong_count_of_host_blocks(hosted):
    hosted.host.pool.free += 1
    expect(hosted, "3 queued, 4 counted")


def test_a_device_block_below_a_host_block(hosted):
    parent, child = hosted.host.pool.blocks[1], hosted._store.pool.blocks[0]
    child.parent.children.clear()
    child.parent, parent.children[child.key] = parent, child
    expect(hosted, "host block 1 has a child on the device")
