"""The end of a server: no new requests, and time for those that run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from ragcache.errors import RagcacheError, ShuttingDown
from ragcache.gateway.tenants import POLLED_PATHS

LAST_WORDS = 2.0  # seconds in which a request that is cut off can still say so

log = logging.getLogger(__name__)


class Draining(Protocol):
    """What answers the requests."""

    draining: bool  # it is not ready for more

    def interrupt(self) -> None:
        """Let all requests under way fail now."""
        ...


class Drain:
    """Counts the requests under way, and lets them end before the server does.

    `told` is done once the server is to end; `fault` is why, where nobody has asked for it.
    """

    def __init__(self, backend: Draining) -> None:
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fault: RagcacheError | None = None
        self._backend = backend
        self._under_way = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def began(self) -> bool:
        """Whether the server has been told to stop."""
        return self._backend.draining

    def tell(self, fault: RagcacheError | None = None) -> None:
        """Tell the server to end."""
        self.fault = self.fault or fault
        if not self.told.done():
            self.told.set_result(None)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while the block runs; raises ShuttingDown once the drain has begun."""
        if self.began:
            raise ShuttingDown("the server is shutting down")
        self._under_way += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._quiet.set()

    async def run(self, seconds: float) -> None:
        """Wait for the requests under way, for so long at most, and then cut them off."""
        self._backend.draining = True
        log.info("stopping; requests under way: %d, given %g s", self._under_way, seconds)
        if not await self._ended(seconds):
            log.warning("cutting off %d requests", self._under_way)
            self._backend.interrupt()
            await self._ended(LAST_WORDS)

    async def _ended(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True


DRAIN = web.AppKey("drain", Drain)


@web.middleware
async def count_under_way(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a stop signal wait for the request, or refuse it; watchers are answered to the end."""
    if request.path in POLLED_PATHS:
        return await handler(request)
    with request.app[DRAIN].request():
        return await handler(request)


async def part_from_client(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler of aiohttp's on_response_prepare: a client's next request goes elsewhere."""
    if request.app[DRAIN].began:
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"
