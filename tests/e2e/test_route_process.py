"""`ragcache route` before two replicas and a Redis server, all of them processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import pytest
from redis_pool import RedisServer
from route_fleet import (
    SYSTEM,
    Load,
    Server,
    ask_chat,
    cached_tokens,
    eventually,
    metrics,
    served,
)

LIMITS = ("--max-running", "4", "--max-queue", "16", "--kv-cache-blocks", "1500")


@contextmanager
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    try:
        yield started
    finally:
        for each in started:
            each.close()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def replicas(tiny_llama, redis) -> Iterator[list[Server]]:
    options = (str(tiny_llama), "--served-model-name", "tiny", *LIMITS, "--redis-url", redis.url)
    with servers() as started:
        started += [Server("serve", *options), Server("serve", *options)]
        for each in started:
            each.wait_until_ready()
        yield started


@pytest.fixture(scope="module")
def running(tiny_llama, redis, replicas) -> Iterator[Server]:
    with servers() as started:
        started.append(Server("route", str(tiny_llama), "--redis-url", redis.url))
        started[0].wait_until_ready()
        yield started[0]


@pytest.fixture
async def router(running, replicas) -> Server:
    """The router, when it knows both replicas and that their caches are empty."""
    await both_usable(running, replicas)
    async with aiohttp.ClientSession(running.url) as http, http.post("/cache/reset") as response:
        assert (await response.json())["reset"] is True
    await asyncio.sleep(1)  # until nothing is expected of what was dropped
    return running


@pytest.fixture
async def http(router):
    async with aiohttp.ClientSession(router.url) as session:
        yield session


async def both_usable(router, replicas) -> None:
    async def usable():
        samples = await metrics(router.url)
        return sum(v for name, v in samples.items() if "_replica_ready{" in name) == len(replicas)

    await eventually(usable, 120)


async def hit_tokens(router) -> list[float]:
    """Of all answers so far: predicted, reported, and the sum of the differences."""
    samples = await metrics(router.url)
    names = ("predicted_hit_tokens", "reported_hit_tokens", "hit_tokens_error")
    return [
        sum(v for name, v in samples.items() if name.startswith(f"ragcache_route_{each}_total"))
        for each in names
    ]


async def test_light_traffic_goes_where_its_prefix_is(router, replicas, http):
    before = [await served(each) for each in replicas]
    cached_tokens(await ask_chat(http, "the first"))
    cached = [cached_tokens(await ask_chat(http, f"Question {i}")) for i in range(30)]
    grown = [await served(each) - was for each, was in zip(replicas, before, strict=True)]
    assert sum(grown) == 31
    assert max(grown) >= 0.9 * sum(grown)
    assert min(cached[-20:]) > 200


async def test_predicted_hits_are_the_reported_ones(router, http):
    await ask_chat(http, "the first", system="Another one. " + SYSTEM)
    before = await hit_tokens(router)
    for i in range(10):
        await ask_chat(http, f"Question {i}", system="Another one. " + SYSTEM)
    predicted, reported, error = (
        now - was for now, was in zip(await hit_tokens(router), before, strict=True)
    )
    assert predicted == reported > 2000
    assert error == 0


async def test_both_replicas_serve_when_it_is_busy(router, replicas, http):
    cached_tokens(await ask_chat(http, "the first"))
    before = [await served(each) for each in replicas]
    asked = (ask_chat(http, f"Question {i}", tokens=64) for i in range(32))
    assert {outcome for outcome, _ in await asyncio.gather(*asked)} == {200}
    grown = [await served(each) - was for each, was in zip(replicas, before, strict=True)]
    assert min(grown) >= 4


@pytest.mark.parametrize("what", ["killed", "frozen", "drained", "flushed"])
async def test_no_request_is_lost_with_a_replica(router, replicas, http, what):
    await ask_chat(http, "the first")
    before = [await served(each) for each in replicas]
    async with Load(router.url) as load:
        await load.answers(10)
        grown = [await served(each) - was for each, was in zip(replicas, before, strict=True)]
        victim = replicas[grown.index(max(grown))]
        await strike(victim, what)
        await load.answers(60)
    assert set(load.outcomes) <= {200, "broken"}
    if what in ("drained", "flushed"):
        assert not load.outcomes["broken"]
    assert sum(load.cached[-20:]) > 200 * 20  # the prefix is found again
    await recover(victim, what)
    await both_usable(router, replicas)
    await ask_chat(http, f"Just {what}")  # what was told a moment ago has been followed after it
    await asyncio.sleep(1)
    *_, error = await hit_tokens(router)
    cached = [cached_tokens(await ask_chat(http, f"After {what} {i}")) for i in range(4)]
    assert cached[-1] > 200
    assert (await hit_tokens(router))[2] == error  # no credit for what is no more


async def strike(victim: Server, what: str) -> None:
    if what == "flushed":
        async with aiohttp.ClientSession(victim.url) as http, http.post("/cache/reset") as reply:
            assert (await reply.json())["blocks"] > 0
    else:
        numbers = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "drained": signal.SIGTERM}
        victim.signal(numbers[what])


async def recover(victim: Server, what: str) -> None:
    if what == "frozen":
        victim.signal(signal.SIGCONT)
    elif what != "flushed":
        status = await asyncio.to_thread(victim.process.wait, 60)
        assert status == (-signal.SIGKILL if what == "killed" else 0)
        victim.start()
        await asyncio.to_thread(victim.wait_until_ready)


async def test_redis_frozen_and_gone_changes_nothing_for_requests(router, replicas, http, redis):
    await ask_chat(http, "the first")
    redis.freeze()
    try:
        for i in range(5):
            assert cached_tokens(await ask_chat(http, f"Question {i}")) > 200
    finally:
        redis.thaw()
    redis.kill()
    async with Load(router.url) as load:
        await load.answers(20)
        redis.start()
        await load.answers(20)
    assert set(load.outcomes) == {200}


async def test_without_redis_conversations_keep_their_replica(replicas):
    urls = [option for each in replicas for option in ("--replica", each.url)]
    with servers() as started:
        started.append(Server("route", *urls))
        router = started[0]
        router.wait_until_ready()
        await both_usable(router, replicas)
        before = [await served(each) for each in replicas]
        async with aiohttp.ClientSession(router.url) as http:
            for system in map(str, range(20)):
                for turn in range(3):
                    cached_tokens(await ask_chat(http, "Hi", tokens=1 + turn, system=system))
        grown = [await served(each) - was for each, was in zip(replicas, before, strict=True)]
        router.signal(signal.SIGTERM)
        assert await asyncio.to_thread(router.process.wait, 30) == 0
    assert sum(grown) == 60
    assert all(each % 3 == 0 and each for each in grown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give redis_url, or replica"),
        (["--replica", "localhost:8001"], "replica.0"),
        (["--redis-url", "http://127.0.0.1"], "redis_url: it must begin with"),
        (["/no/such/folder", "--redis-url", "redis://127.0.0.1:1"], "no folder"),
    ],
)
def test_a_wrong_option_is_one_clear_line(options, message):
    command = [sys.executable, "-m", "ragcache", "route", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
