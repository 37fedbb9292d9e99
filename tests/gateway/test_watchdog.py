"""An engine that hangs, as the log and the probes tell it."""

import asyncio

import aiohttp
import pytest

from ragcache.gateway import watchdog


@pytest.fixture
def lines(caplog):
    """The watchdog's lines, once there are so many and time to write more."""

    async def lines(count):
        async with asyncio.timeout(10):
            while len(found := [r for r in caplog.records if r.name == watchdog.log.name]) < count:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        return [(each.levelname, each.getMessage()) for each in found]

    return lines


async def test_a_hang_is_told_once_with_the_stack_and_so_is_its_end(
    start, serving, lines, monkeypatch
):
    monkeypatch.setattr(watchdog, "INTERVAL", 0.005)
    url = await start()
    serving.not_ready, serving.stack = "no step for 61 seconds", "in the forward pass"
    ((level, told),) = await lines(1)
    assert level == "ERROR"
    assert told == "the engine hangs: no step for 61 seconds; at\nin the forward pass"
    async with aiohttp.ClientSession(url) as http, http.get("/ready") as response:
        assert response.status == 503
        assert await response.json() == {"ready": False, "reason": "no step for 61 seconds"}
        async with http.get("/metrics") as page:
            assert "ragcache_ready 0.0" in await page.text()
    serving.not_ready = serving.stack = None
    *_, (level, told) = await lines(2)
    assert (level, told) == ("WARNING", "the engine goes on: it is ready")
    serving.stack = "again"
    assert (await lines(3))[2][1].endswith("again")


async def test_there_is_nothing_to_watch_while_the_model_loads(start, errors_logged, monkeypatch):
    monkeypatch.setattr(watchdog, "INTERVAL", 0.005)
    await start(asyncio.get_running_loop().create_future())
    await asyncio.sleep(0.05)
    assert not errors_logged()
