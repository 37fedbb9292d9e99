"""The view of a pool in memory: leases by its own clock, blocks by position."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragcache.cluster.blocks import Blocks, Changes
from ragcache.cluster.directory import Directory
from ragcache.cluster.keys import LEASE
from ragcache.cluster.replica import Replica
from ragcache.prefix.names import block_names, namespace_name, owner_name

NAMESPACE = namespace_name(owner_name("model", "tenant"))
NAMES = block_names(NAMESPACE, range(20), 2)
A = Replica("a:1", "first", "http://a:1", ("m",), "model", 2, 0, 0, draining=False)
B = replace(A, id="b:1", url="http://b:1")


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def cut(names: list[bytes]) -> bytes:
    return b"".join(name[:16] for name in names)


def holding(names: list[bytes]) -> Blocks:
    blocks = Blocks()
    blocks.apply(Changes(device=cut(names)))
    return blocks


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock) -> Directory:
    """Connected, with a replica that holds four of the ten blocks."""
    directory = Directory(clock)
    directory.found()
    directory.renew(A, 15)
    directory.restore(A, 7, holding(NAMES[:4]))
    return directory


def test_leading_blocks_are_counted(directory):
    assert directory.match(A.id, NAMES) == 4
    assert directory.match(A.id, NAMES[:3]) == 3
    assert directory.match(A.id, NAMES[1:]) == 3
    assert directory.match(A.id, []) == 0
    other = namespace_name(owner_name("model", "other"))
    assert directory.match(A.id, block_names(other, range(20), 2)) == 0
    assert directory.match("unknown", NAMES) == 0


def test_blocks_on_the_host_count_and_can_be_told(directory):
    directory.apply(A, 8, Changes(host=cut(NAMES[3:6])))
    assert directory.match(A.id, NAMES) == 6
    assert directory.hosted(A.id, NAMES[:6]) == 3
    assert directory.hosted(A.id, NAMES[:2]) == 0
    directory.apply(A, 9, Changes(device=cut(NAMES[3:5])))
    assert directory.hosted(A.id, NAMES[:6]) == 1


def test_blocks_without_their_parents_break_nothing(directory):
    directory.restore(A, 7, holding(NAMES[2:4]))
    for stop in range(len(NAMES)):
        assert 0 <= directory.hosted(A.id, NAMES[:stop]) <= stop


def test_changes_are_applied_in_a_row(directory):
    directory.apply(A, 8, Changes(device=cut(NAMES[4:6]), removed=cut(NAMES[9:])))
    directory.apply(A, 9, Changes(removed=cut(NAMES[5:6])))
    assert directory.match(A.id, NAMES) == 5
    assert directory.positions() == {A: 9}


@pytest.mark.parametrize("position", [7, 9, 200])
def test_after_a_missing_batch_a_snapshot_is_awaited(directory, position):
    directory.apply(A, position, Changes(removed=cut(NAMES[2:4])))
    directory.apply(A, 8, Changes(removed=cut(NAMES[:4])))
    assert directory.positions() == {A: None}
    assert directory.match(A.id, NAMES) == 4  # as it was, until then
    directory.restore(A, 201, holding(NAMES[:2]))
    directory.apply(A, 202, Changes(device=cut(NAMES[2:3])))
    assert directory.match(A.id, NAMES) == 3


def test_a_new_epoch_has_nothing_of_the_old_one(directory):
    reborn = replace(A, epoch="second")
    directory.renew(reborn, 15)
    assert directory.match(A.id, NAMES) == 0
    directory.apply(A, 8, Changes(device=cut(NAMES)))
    directory.restore(A, 8, holding(NAMES))
    assert directory.match(A.id, NAMES) == 0
    assert directory.positions() == {reborn: None}


def test_a_renewed_lease_keeps_the_blocks_and_brings_the_load(directory):
    busy = replace(A, running=3, draining=True)
    directory.renew(busy, 15)
    assert directory.replicas() == [busy]
    assert directory.match(A.id, NAMES) == 4


def test_an_expired_lease_has_no_credit(directory, clock):
    directory.renew(B, 20)
    clock.now += 15
    assert directory.replicas() == [B]
    assert directory.match(A.id, NAMES) == 0
    directory.expire()
    directory.renew(A, 15)
    assert directory.positions() == {B: None, A: None}


def test_nothing_expires_while_the_server_is_away_nor_at_once_when_it_is_back(directory, clock):
    directory.lost()
    clock.now += 1000
    directory.expire()
    assert directory.replicas() == [A]
    assert directory.match(A.id, NAMES) == 4
    directory.found()
    assert directory.replicas() == [A]
    directory.found()  # going on to answer gives nothing
    clock.now += LEASE
    assert directory.replicas() == []


def test_changes_are_read_as_they_are_written():
    changes = Changes(device=cut(NAMES[:2]), removed=cut(NAMES[2:3]))
    fields = {name.encode(): row for name, row in changes.fields().items()}
    assert Changes.read(fields) == changes
    assert len(changes) == 3
    assert len(Changes()) == 0
    with pytest.raises(ValueError, match="cut off"):
        Changes.read({b"host": NAMES[0][:15]})
