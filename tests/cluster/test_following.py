"""Who knows what of whom, with a server that works."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from redis_pool import eventually, known, names

from ragcache.cluster.keys import FAREWELL, LEASE


async def test_blocks_of_a_replica_are_known_and_forgotten(pool):
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await eventually(lambda: directory.match("a:8000", names([1] * 8)) == 4)
    assert directory.match("a:8000", names([2] * 8)) == 0
    assert directory.replicas() == [replica.replica]
    replica.cache.reset()
    await eventually(lambda: directory.match("a:8000", names([1] * 8)) == 0)
    assert known(directory, replica) == {}


async def test_blocks_that_move_to_the_host_are_known_as_such(pool):
    replica, directory = pool.replica(blocks=4), pool.directory()
    replica.serve([1] * 8)
    replica.serve([2] * 6)
    found = names([1] * 8)
    await eventually(lambda: known(directory, replica) == replica.outbox.blocks())
    assert directory.match("a:8000", found) == 4
    assert directory.hosted("a:8000", found) == 3


async def test_who_comes_late_knows_what_happened_before(pool):
    replica, early = pool.replica(), pool.directory()
    for token in range(30):
        replica.serve([token] * 6)
        if token % 10 == 0:
            await eventually(lambda token=token: known(early, replica) == replica.outbox.blocks())
    late = pool.directory()
    await eventually(lambda: known(late, replica) == replica.outbox.blocks())
    assert late.match("a:8000", names([29] * 6)) == 3
    replica.serve([31] * 6)
    for directory in (early, late):
        await eventually(lambda view=directory: view.match("a:8000", names([31] * 6)) == 3)


async def test_load_comes_with_the_lease(pool):
    replica, directory = pool.replica(), pool.directory()
    await eventually(directory.replicas)
    replica.says(running=3, waiting=7)
    await eventually(lambda: directory.replicas() == [replica.replica])


async def test_draining_is_told_before_the_lease_is_due(pool, monkeypatch):
    monkeypatch.setattr("ragcache.cluster.publisher.RENEWAL", 3600)
    replica, directory = pool.replica(), pool.directory()
    await eventually(directory.replicas)
    replica.replica = replace(replica.replica, draining=True)
    await eventually(lambda: directory.replicas()[0].draining)


async def test_who_leaves_is_gone_soon_and_leaves_nothing(pool, redis_server):
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await eventually(lambda: known(directory, replica))
    await replica.publisher.close()
    await eventually(lambda: directory.replicas()[0].draining)
    assert redis_server.admin.ttl(pool.keys.lease("a:8000")) <= FAREWELL
    await eventually(lambda: not directory.replicas())
    assert redis_server.admin.keys() == [pool.keys.replicas.encode()]


async def test_who_is_killed_has_no_credit_after_its_lease(pool, redis_server):
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await eventually(lambda: known(directory, replica))
    await replica.die()
    lease = pool.keys.lease("a:8000")
    assert LEASE - 6 < redis_server.admin.ttl(lease) <= LEASE
    redis_server.admin.pexpire(lease, 1500)  # the rest of it goes by
    await asyncio.sleep(1)
    assert directory.match("a:8000", names([1] * 8)) == 4
    await eventually(lambda: directory.match("a:8000", names([1] * 8)) == 0)
    assert directory.replicas() == []


async def test_a_second_life_at_one_address_has_nothing_of_the_first(pool):
    first, directory = pool.replica(), pool.directory()
    first.serve([1] * 8)
    await eventually(lambda: known(directory, first))
    await first.die()
    second = pool.replica()
    await eventually(lambda: directory.replicas() == [second.replica])
    assert directory.match("a:8000", names([1] * 8)) == 0
    second.serve([2] * 8)
    await eventually(lambda: directory.match("a:8000", names([2] * 8)) == 4)
    assert directory.match("a:8000", names([1] * 8)) == 0
    late = pool.directory()
    await eventually(lambda: known(late, second) == second.outbox.blocks())
    await second.publisher.close()


async def test_two_lives_at_one_address_are_warned_of(pool, caplog):
    one, other = pool.replica(), pool.replica()
    for _ in range(3):
        for life in (one, other):
            life.says()
            await asyncio.sleep(0.3)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "another replica says that it is reached at http://a:8000, too"
    ] * 2


async def test_pools_do_not_see_each_other(make_pool):
    one, other = make_pool(name="one"), make_pool(name="other")
    here, there = one.replica(), other.replica()
    here.serve([1] * 8)
    one_view, other_view = one.directory(), other.directory()
    await eventually(lambda: known(one_view, here))
    await eventually(lambda: known(other_view, there) == {})
    assert other_view.match("a:8000", names([1] * 8)) == 0


async def test_a_trimmed_stream_is_made_up_for_by_the_next_snapshot(
    pool, redis_server, monkeypatch
):
    replica, directory = pool.replica(), pool.directory()
    await eventually(lambda: known(directory, replica) == {})
    monkeypatch.setattr("ragcache.cluster.follower.INTERVAL", 0)
    events = pool.keys.events("a:8000", replica.replica.epoch)
    redis_server.admin.config_set("stream-node-max-entries", 1)
    with redis_server.admin.pipeline() as transaction:  # as if the follower had slept meanwhile
        transaction.xadd(events, {"removed": b""}, id="3-0")
        transaction.xtrim(events, maxlen=0)
        transaction.execute()
    replica.serve([1] * 8)  # its batch is refused, since there is a third one
    await eventually(lambda: known(directory, replica) == replica.outbox.blocks())
    assert directory.match("a:8000", names([1] * 8)) == 4


async def test_too_many_changes_are_told_by_a_snapshot(pool):
    replica, directory = pool.replica(blocks=200, most_changes=5), pool.directory()
    await eventually(lambda: known(directory, replica) == {})
    replica.serve(list(range(100)))
    assert known(directory, replica) == {}
    await eventually(lambda: known(directory, replica) == replica.outbox.blocks())
    stats = replica.publisher.stats()
    assert (stats.published, stats.dropped) == (0, 50)
    replica.serve([1] * 6)
    await eventually(lambda: known(directory, replica) == replica.outbox.blocks())
    assert replica.publisher.stats().published == 3


async def test_changes_that_were_dropped_during_an_outage_are_made_up_for(pool, monkeypatch):
    replica, directory = pool.replica(blocks=200, most_changes=5), pool.directory()
    await eventually(lambda: known(directory, replica) == {})
    attempts = []

    async def forget_dead(*_: object) -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("away")

    monkeypatch.setattr("ragcache.cluster.lease.forget_dead", forget_dead)
    replica.serve(list(range(100)))
    await eventually(lambda: len(attempts) == 3)
    await eventually(lambda: known(directory, replica) == replica.outbox.blocks())


async def test_keys_are_bounded_and_all_of_them_end(pool, redis_server, monkeypatch):
    monkeypatch.setattr("ragcache.cluster.publisher.MOST_BATCHES", 5)
    redis_server.admin.config_set("stream-node-max-entries", 5)
    chance = random.Random(1)
    replicas = [pool.replica(name) for name in ("a", "b")]
    directory = pool.directory()
    for _ in range(1500):
        for replica in replicas:
            replica.serve([chance.randrange(10**6) for _ in range(6)])
        await asyncio.sleep(0.001)
    for replica in replicas:
        await eventually(lambda life=replica: known(directory, life) == life.outbox.blocks())
    keys = redis_server.admin.keys()
    assert len(keys) == 7  # ids; leases, events and snapshots of two
    assert all(redis_server.admin.ttl(key) > 0 for key in keys)
    for replica in replicas:
        assert replica.publisher._position > 15
        events = pool.keys.events(replica.replica.id, replica.replica.epoch)
        assert redis_server.admin.xlen(events) <= 10  # whole nodes are cut off
