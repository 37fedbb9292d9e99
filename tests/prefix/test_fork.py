"""Branches of one prompt: shared blocks, and copies of the partly filled last one."""

from __future__ import annotations

import pytest


def run_copies(cache):
    copies = cache.take_copies()
    cache.copies_done()
    return copies


def test_a_fork_takes_no_block(cache):
    cache.run("a", [1] * 6)
    row = cache.fork("a", "b", [1] * 6)
    assert (row.table, row.num_computed) == ([0, 1], 6)
    assert cache.refs() == [2, 2] + [0] * 8
    assert cache.available == 8


def test_all_but_the_last_writer_get_a_copy_of_the_shared_tail(cache):
    cache.run("a", [1] * 6)
    for dst in ("b", "c"):
        cache.fork("a", dst, [1] * 6)
    for request_id in ("b", "a", "c"):
        assert cache.grow(request_id, 7)
    assert [cache.table(each) for each in "abc"] == [[0, 3], [0, 2], [0, 1]]
    assert cache.refs() == [3, 3, 2, 2] + [0] * 6  # the source for c and both copies
    assert cache.take_copies() == [(1, 2), (1, 3)]
    cache.copies_done()
    assert cache.refs() == [3, 1, 1, 1] + [0] * 6


def test_a_row_grows_in_place_once_it_is_alone(cache):
    cache.run("a", [1] * 6)
    cache.fork("a", "b", [1] * 6)
    cache.release("a")
    assert cache.grow("b", 7)
    assert cache.table("b") == [0, 1]
    assert cache.take_copies() == []


def test_full_blocks_are_shared_and_never_copied(cache):
    cache.run("a", [1] * 8)
    cache.fork("a", "b", [1] * 8)
    assert cache.grow("a", 9)
    assert cache.grow("b", 9)
    assert [cache.table(each) for each in "ab"] == [[0, 1, 2], [0, 1, 3]]
    assert cache.take_copies() == []


def test_growing_over_several_blocks_copies_the_tail_as_well(cache):
    cache.run("a", [1] * 6)
    cache.fork("a", "b", [1] * 6)
    assert cache.grow("b", 13)
    assert cache.table("b") == [0, 2, 3, 4]
    assert run_copies(cache) == [(1, 2)]


def test_grow_counts_the_copy_and_is_all_or_nothing(cache):
    cache.run("a", [1] * 6)
    cache.fork("a", "b", [1] * 6)
    cache.run("c", [2] * 28)
    assert cache.available == 1
    before = cache.queue(), cache.refs()
    assert not cache.grow("b", 9)  # a block and a copy
    assert (cache.queue(), cache.refs()) == before
    assert cache.grow("b", 7)
    assert run_copies(cache) == [(1, 9)]


def test_both_ends_of_a_copy_stay_held_until_it_ran(cache):
    cache.run("a", [1] * 6)
    cache.fork("a", "b", [1] * 6)
    cache.grow("b", 7)
    cache.release("a")
    cache.release("b")
    assert cache.refs()[1:3] == [1, 1]
    assert cache.take_copies() == [(1, 2)]
    assert cache.admit("c", cache.plan([3] * 36, cache.tenant)) is None
    cache.copies_done()
    assert cache.counts().held == 0
    assert cache.queue()[-1] == 0


def test_copies_asked_for_during_a_step_belong_to_the_next(cache):
    cache.run("a", [1] * 6)
    for dst in ("b", "c"):
        cache.fork("a", dst, [1] * 6)
    cache.grow("a", 7)
    assert cache.take_copies() == [(1, 2)]
    cache.grow("b", 7)
    cache.copies_done()
    assert cache.refs()[1:4] == [2, 1, 2]
    assert run_copies(cache) == [(1, 3)]
    assert cache.refs()[1:4] == [1, 1, 1]


def test_a_block_is_not_published_while_it_is_copied(cache):
    tokens = [1] * 6
    cache.run("a", tokens)
    cache.fork("a", "b", [1] * 6)
    cache.grow("a", 8)
    tokens += [1, 1]
    with pytest.raises(RuntimeError, match="being copied"):
        cache.commit("a", 8)
    run_copies(cache)
    cache.commit("a", 8)
    assert cache.published() == [0, 2]


def test_branches_that_say_the_same_meet_again(cache):
    rows = {"a": [1] * 6, "b": [1] * 6}
    cache.run("a", rows["a"])
    cache.fork("a", "b", rows["b"])
    for request_id, tokens in rows.items():
        tokens += [5, 5, 5]
        cache.grow(request_id, 9)
    run_copies(cache)
    for request_id in rows:
        cache.commit(request_id, 9)
    assert cache.table("a")[:2] == cache.table("b")[:2] == [0, 2]
    assert cache.refs() == [2, 0, 2, 1, 1] + [0] * 5


def test_branches_that_differ_are_both_found(cache):
    rows = {"a": [1] * 6, "b": [1] * 6}
    cache.run("a", rows["a"])
    cache.fork("a", "b", rows["b"])
    for request_id, tokens in rows.items():
        tokens += [ord(request_id)] * 2
        cache.grow(request_id, 8)
    run_copies(cache)
    for request_id in rows:
        cache.commit(request_id, 8)
    assert cache.hit([*rows["a"], 0]) == cache.hit([*rows["b"], 0]) == 8


def test_only_a_committed_row_can_be_forked(cache):
    cache.start("a", [1] * 6)
    cache.commit("a", 4)
    with pytest.raises(ValueError, match="uncommitted"):
        cache.fork("a", "b", [1] * 6)
    with pytest.raises(KeyError):
        cache.fork("unknown", "b", [])
