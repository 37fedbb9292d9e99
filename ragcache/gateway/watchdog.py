"""Tells the log when the engine hangs, and where."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import web

from ragcache.gateway.backend import BACKEND, Backend

if TYPE_CHECKING:
    from ragcache.serving import Serving

INTERVAL = 1.0  # seconds

log = logging.getLogger(__name__)


class Watchdog:
    """Looks after one engine; `look` tells what has changed since the last time."""

    def __init__(self) -> None:
        self._stuck = False

    def look(self, serving: Serving) -> None:
        """Log once that the engine hangs, and once that it goes on."""
        was, self._stuck = self._stuck, serving.stuck
        if self._stuck and not was:
            log.error("the engine hangs: %s; at\n%s", serving.ready(), serving.engine_stack())
        elif was and not self._stuck:
            log.warning("the engine goes on: %s", serving.ready() or "it is ready")


async def watch(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context of aiohttp: a watchdog for as long as the server runs."""
    task = asyncio.create_task(_watch(app[BACKEND]))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _watch(backend: Backend) -> None:
    watchdog = Watchdog()
    while True:
        await asyncio.sleep(INTERVAL)
        if backend.loaded is not None:
            watchdog.look(backend.loaded)
