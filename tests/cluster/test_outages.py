"""A server that is away, refuses, forgets or is slow: work goes on, and comes right by itself."""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import asynccontextmanager

import pytest
from redis_pool import RedisServer, eventually, known, names


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "ragcache.cluster")
    return caplog


AWAY, BACK = "going on without", "working with"


def lines(log) -> list[str]:
    """What the log says, each line without the server and the reason."""
    return [record.msg.split(" %s")[0] for record in log.records]


async def agree(directory, replica) -> None:
    await eventually(lambda: known(directory, replica) == replica.outbox.blocks(), 40)


async def test_a_frozen_server_costs_nothing_but_news(pool, redis_server, log):
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await agree(directory, replica)
    assert lines(log) == [BACK] * 2
    redis_server.freeze()
    await eventually(lambda: not directory.connected and not replica.publisher.stats().connected)
    replica.serve([2] * 8)
    assert directory.match("a:8000", names([1] * 8)) == 4
    assert directory.match("a:8000", names([2] * 8)) == 0
    assert directory.replicas() == [replica.replica]
    await asyncio.sleep(2)  # a few more attempts
    assert replica.publisher.stats().lag_seconds > 2
    redis_server.thaw()
    await eventually(lambda: directory.match("a:8000", names([2] * 8)) == 4)
    await agree(directory, replica)
    assert replica.publisher.stats().lag_seconds == 0
    assert lines(log) == [BACK] * 2 + [AWAY] * 2 + [BACK] * 2


async def test_a_server_that_comes_back_empty_is_told_everything(pool, redis_server, log):
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await agree(directory, replica)
    redis_server.kill()
    await eventually(lambda: not directory.connected and not replica.publisher.stats().connected)
    replica.serve([2] * 8)
    redis_server.start()
    await eventually(lambda: directory.match("a:8000", names([2] * 8)) == 4)
    await agree(directory, replica)
    await agree(pool.directory(), replica)
    assert lines(log)[:6] == [BACK] * 2 + [AWAY] * 2 + [BACK] * 2


async def test_a_server_may_be_absent_at_the_start(make_pool, log):
    server = RedisServer()
    pool = make_pool(server.url)
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await eventually(lambda: len(log.records) == 2)
    await asyncio.sleep(1)
    assert directory.replicas() == []
    server.start()
    await agree(directory, replica)
    assert lines(log) == [AWAY] * 2 + [BACK] * 2
    await pool.close()
    server.close()


async def test_a_wrong_password_is_one_line_until_it_is_right(make_pool, redis_server, log):
    redis_server.admin.execute_command("ACL", "SETUSER", "replica", "on", "~*", "+@all")
    replica = make_pool(f"unix://replica:open-sesame@{redis_server.socket}").replica()
    await eventually(lambda: log.records)
    await asyncio.sleep(1)
    assert lines(log) == [AWAY]
    assert "invalid username-password pair" in log.text
    redis_server.admin.execute_command("ACL", "SETUSER", "replica", ">open-sesame")
    await eventually(lambda: replica.publisher.stats().connected)
    assert lines(log) == [AWAY, BACK]
    assert "sesame" not in log.text


async def test_a_full_server_keeps_the_lease_and_is_told_later(pool, redis_server, log):
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await agree(directory, replica)
    redis_server.admin.config_set("maxmemory", 1)  # and nothing is evicted, by default
    replica.serve([2] * 8)
    await eventually(lambda: not replica.publisher.stats().connected)
    assert log.records[-1].message.endswith("command not allowed when used memory > 'maxmemory'.")
    lease = pool.keys.lease("a:8000")
    redis_server.admin.expire(lease, 5)  # some of it goes by
    await eventually(lambda: redis_server.admin.ttl(lease) > 5)
    assert directory.connected
    assert directory.match("a:8000", names([1] * 8)) == 4
    redis_server.admin.config_set("maxmemory", 0)
    await eventually(lambda: directory.match("a:8000", names([2] * 8)) == 4)
    await agree(directory, replica)
    assert lines(log) == [BACK] * 2 + [AWAY, BACK]


async def test_a_flushed_server_is_filled_again_and_nobody_is_lost_meanwhile(pool, redis_server):
    replica, directory = pool.replica(), pool.directory()
    replica.serve([1] * 8)
    await agree(directory, replica)
    redis_server.admin.flushall()
    replica.serve([2] * 8)
    late = pool.directory()
    while known(late, replica) is None:
        assert directory.replicas() == [replica.replica]
        assert directory.match("a:8000", names([1] * 8)) == 4
        await asyncio.sleep(0.01)
    for view in (directory, late):
        await agree(view, replica)
    assert directory.match("a:8000", names([2] * 8)) == 4


@asynccontextmanager
async def slow(socket: str, delay: float):
    """A way to a server that takes `delay` seconds longer; yields its URL."""

    async def pump(reader, writer, wait: float) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(wait)
            writer.write(data)
        writer.close()

    async def handle(reader, writer) -> None:
        handling.append(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_unix_connection(socket)
        await asyncio.gather(
            pump(reader, far_writer, 0), pump(far_reader, writer, delay), return_exceptions=True
        )

    handling = []
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*handling)


async def test_a_slow_server_is_used_while_it_answers_in_time(make_pool, redis_server):
    async with slow(redis_server.socket, 0.2) as url:
        pool = make_pool(url)
        replica, directory = pool.replica(), pool.directory()
        replica.serve([1] * 8)
        await agree(directory, replica)
        await pool.close()


async def test_a_server_that_is_too_slow_counts_as_away(make_pool, redis_server, log):
    async with slow(redis_server.socket, 0.6) as url:
        pool = make_pool(url)
        pool.replica()
        await eventually(lambda: log.records)
        await asyncio.sleep(2)
        assert len(log.records) == 1
        await pool.close()
    assert "imeout" in log.text


async def test_whatever_happens_all_agree_in_the_end(pool, redis_server):
    """Random lives of replicas, caches and the server."""
    chance = random.Random(7)
    replicas = {name: pool.replica(name, blocks=12, most_changes=10) for name in "ab"}
    directory = pool.directory()

    async def reborn() -> None:
        name = chance.choice("ab")
        await replicas[name].die()
        replicas[name] = pool.replica(name, blocks=12, most_changes=10)

    async def serve() -> None:
        for _ in range(chance.randrange(5)):
            prompt = [chance.randrange(2) for _ in range(chance.randrange(2, 14))]
            chance.choice(list(replicas.values())).serve(prompt)

    async def reset() -> None:
        chance.choice(list(replicas.values())).cache.reset()

    async def flush() -> None:
        redis_server.admin.flushall()

    async def cut() -> None:
        redis_server.admin.execute_command("CLIENT KILL TYPE normal SKIPME yes")

    async def trim() -> None:
        for life in replicas.values():
            redis_server.admin.xtrim(
                pool.keys.events(life.replica.id, life.replica.epoch), maxlen=0, approximate=False
            )

    deeds = [serve] * 12 + [reset, flush, cut, trim, reborn]
    for _ in range(100):
        await chance.choice(deeds)()
        await asyncio.sleep(chance.choice([0, 0, 0.05, 0.1]))
    for life in replicas.values():
        life.serve([0] * 12)  # a gap is seen when something comes behind it
        await agree(directory, life)
        await life.publisher.close()
