"""How busy the engine was in the last ten minutes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from ragcache.gateway.backend import Backend
from ragcache.metrics.slots import Slots
from ragcache.metrics.tally import SLOT, SLOTS
from ragcache.types import EngineStats


class Load(Slots[EngineStats | None]):
    """The engine as it was in the beginning of each slot; None while the model was loading."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(SLOT, SLOTS, backend.stats)

    async def watch(self) -> None:
        """Look at it until cancelled, so that a page that is opened later shows the past."""
        while True:
            self.now()
            await asyncio.sleep(SLOT / 2)


LOAD = web.AppKey("load", Load)


async def watch_load(app: web.Application) -> AsyncIterator[None]:
    """Watch the engine while the application runs."""
    watching = asyncio.create_task(app[LOAD].watch())
    yield
    watching.cancel()
