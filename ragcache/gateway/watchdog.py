"""Tells the log when the engine hangs, and where; and the server when the engine has failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import web

from ragcache.gateway.backend import BACKEND
from ragcache.gateway.drain import DRAIN

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
    task = asyncio.create_task(_watch(app))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _watch(app: web.Application) -> None:
    watchdog = Watchdog()
    while True:
        await asyncio.sleep(INTERVAL)
        if (serving := app[BACKEND].loaded) is None:
            continue
        watchdog.look(serving)
        if serving.failure is not None:  # for good: only a new process can go on
            log.error("the server ends: %s", serving.failure.message)
            app[DRAIN].tell(serving.failure)
            return
