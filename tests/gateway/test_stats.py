"""/cache/stats over a real engine and over a scripted one: segments, prefixes, tenants, cost."""

import asyncio
import time

import aiohttp
import pytest

from ragcache.types import HotPrefix

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}]}
KEYS = {"one": {"x-api-key": "key-one"}, "two": {"x-api-key": "key-two"}}


@pytest.fixture
async def stats(http):
    async def stats():
        async with http.get("/cache/stats") as response:
            assert response.status == 200
            return await response.json()

    return stats


async def ask(http, **headers):
    async with http.post("/v1/chat/completions", json=ASK, **headers) as response:
        assert response.status == 200


async def test_prefixes_are_shown_by_fingerprint_age_and_what_is_left_of_retention(stats, serving):
    now = time.monotonic()
    root = HotPrefix(bytes(range(32)), None, 160, 9, 1440, now - 50, now + 300)
    ended = HotPrefix(b"\xff" * 32, root.name, 200, 4, 160, now - 20, now - 1)
    serving.prefixes = [root, ended]
    first, second = (await stats())["prefixes"]
    age, left = first.pop("age"), first.pop("retention")
    assert 50 <= age < 60
    assert 290 < left <= 300
    assert first == {
        "fingerprint": "000102030405",
        "parent": None,
        "tokens": 160,
        "hits": 9,
        "hit_tokens": 1440,
    }
    assert (second["parent"], second["retention"]) == ("000102030405", None)


async def test_the_engine_is_not_asked_while_nothing_changes(stats, http, serving):
    await stats()
    await stats()
    assert serving.asked == [""]
    await asyncio.sleep(1.1)
    await stats()
    assert serving.asked == [""]
    await ask(http)
    await asyncio.gather(*(stats() for _ in range(20)))
    assert serving.asked == ["", ""]
    await ask(http)
    await stats()
    assert serving.asked == ["", ""]  # within the same second


async def test_a_slow_engine_does_not_hold_up_the_answer(stats, http, serving):
    serving.prefixes = [HotPrefix(b"a" * 32, None, 16, 1, 16, 0.0, None)]
    assert len((await stats())["prefixes"]) == 1
    serving.answering.clear()
    await asyncio.sleep(1.1)
    await ask(http)
    serving.prefixes = []
    assert len((await stats())["prefixes"]) == 1  # what it said before
    serving.answering.set()
    assert (await stats())["prefixes"] == []


async def test_prefixes_that_cannot_be_told_are_an_error_of_that_answer_alone(
    stats, http, serving, errors_logged, monkeypatch
):
    async def broken(tenant, count):
        raise LookupError("a bug in the walk")

    monkeypatch.setattr(serving, "hot_prefixes", broken)
    async with http.get("/cache/stats") as response:
        assert response.status == 500
    assert errors_logged()
    monkeypatch.undo()
    await asyncio.sleep(1.1)  # until the engine is asked again
    await stats()


async def test_tenants_see_their_own_segments_and_prefixes(start, serving):
    url = await start(api_keys=["key-one", "key-two"])
    serving.script.cached_tokens = 3
    async with aiohttp.ClientSession(url) as http:
        await ask(http, headers=KEYS["one"])
        seen = {}
        for name, headers in KEYS.items():
            async with http.get("/cache/stats", headers=headers) as response:
                seen[name] = await response.json()
    assert seen["one"]["segments"]["messages"]["hit"] == 3
    assert seen["one"]["saved"]["tokens"] == 3
    assert seen["two"]["segments"]["messages"]["query"] == 0
    assert seen["two"]["saved"] == {"tokens": 0, "seconds": 0, "prefill_rate": 200}
    assert len(set(serving.asked)) == 2
    assert "pool" not in seen["one"]
