"""Which replicas a router knows and asks, by their leases and by what they answer to probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from ragcache.cluster.directory import Directory
from ragcache.cluster.replica import Replica
from ragcache.cluster.router import Router
from ragcache.gateway.app import listening
from ragcache.gateway.route import fleet, pulse
from ragcache.gateway.route.fleet import Fleet


class World:
    """A replica, its leases, and a fleet that knows of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reason: str | None = None  # why it is not ready
        self.probes = 0
        self.gone: list[str] = []
        self.directory = Directory(lambda: self.now)
        self.directory.found()
        self.fleet = Fleet([], self.directory, Router(self.directory), self.gone.append)

    async def ready(self, _: web.Request) -> web.Response:
        self.probes += 1
        return web.json_response({"reason": self.reason}, status=503 if self.reason else 200)

    def renew(self, **values: object) -> None:
        self.replica = replace(self.replica, **values)
        self.directory.renew(self.replica, 15)

    def usable(self) -> list[str]:
        return [replica.id for replica in self.fleet.usable()]

    async def look_twice(self) -> None:
        """Time for the fleet to notice what has changed."""
        probes = self.probes
        await self.until(lambda: self.probes > probes + 1)
        await asyncio.sleep(0.05)

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
async def world(monkeypatch) -> AsyncIterator[World]:
    """With a replica that has a lease and is usable."""
    monkeypatch.setattr(fleet, "INTERVAL", 0.02)
    monkeypatch.setattr(pulse, "INTERVAL", 0.02)
    monkeypatch.setattr(pulse, "TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    world = World()
    app = web.Application()
    app.router.add_get("/ready", world.ready)
    async with listening(app, "127.0.0.1", 0) as url:
        world.replica = Replica("a", "1", url, ("m",), "f", 16, 0, 0, False)
        world.renew()
        running = asyncio.create_task(world.fleet.run())
        await world.until(world.usable)
        yield world
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_replica_that_answers_needs_no_lease(world):
    world.now += 100
    world.directory.expire()
    assert not world.directory.replicas()
    await world.look_twice()
    assert world.usable() == ["a"]
    world.reason = "busy dying"
    await world.until(lambda: world.gone == ["a"])
    assert world.usable() == []
    world.reason = None
    world.renew()
    await world.until(world.usable)


async def test_who_has_said_farewell_goes_with_its_lease(world):
    world.renew(draining=True)
    assert world.usable() == []
    await world.look_twice()
    assert world.gone == []
    world.now += 100
    await world.until(lambda: world.gone == ["a"])


async def test_who_has_work_is_probed_on(world):
    async with world.fleet.pulse(world.replica).watch():
        world.renew(draining=True)
        await world.look_twice()
        world.now += 100
        await world.look_twice()
        assert world.gone == []
        assert world.usable() == world.fleet.known() == []
    await world.until(lambda: world.gone == ["a"])


async def test_what_a_lease_says_last_holds(world):
    world.renew(epoch="2", running=7)
    await world.look_twice()
    world.now += 100
    (known,) = world.fleet.usable()
    assert known == world.replica


async def test_only_the_first_reason_is_logged(world, caplog):
    caplog.set_level(logging.INFO, "ragcache.gateway.route.pulse")
    for seconds in range(61, 64):
        world.reason = f"no step for {seconds} seconds"
        await world.look_twice()
    world.reason = None
    await world.until(world.usable)
    url = world.replica.url
    assert [record.message for record in caplog.records] == [
        f"replica {url} is not ready: no step for 61 seconds",
        f"replica {url} is ready",
    ]
