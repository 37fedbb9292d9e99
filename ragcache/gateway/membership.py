"""This gateway as one replica of a pool."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING
from uuid import uuid4

from aiohttp import web

from ragcache.cluster.keys import Keys
from ragcache.cluster.outbox import Outbox
from ragcache.cluster.publisher import Publisher
from ragcache.cluster.replica import Replica
from ragcache.cluster.server import Server
from ragcache.config import ServeSettings
from ragcache.gateway.backend import BACKEND, Backend
from ragcache.gateway.meter import METRICS
from ragcache.metrics.cluster import ClusterCollector
from ragcache.types import ClusterStats

if TYPE_CHECKING:
    from ragcache.serving import Serving


class Membership:
    """Tells the pool of this gateway, from when its model is loaded until it has stopped.

    `outbox` is the sink of the engine's prefix cache, `url` where others reach it. Raises
    ConfigError for a URL of Redis that is wrong; whether the server is there never matters.
    """

    def __init__(self, url: str, settings: ServeSettings) -> None:
        self.outbox = Outbox()
        self._server = Server(url)
        self._keys = Keys(settings.cluster_name)
        self.url = (settings.advertise_url or _default_url(settings)).rstrip("/")
        self._epoch = uuid4().hex
        self._publisher: Publisher | None = None

    def join(self, app: web.Application) -> None:
        """Take part for as long as this application runs."""
        app.cleanup_ctx.append(self._take_part)
        app[METRICS].register(ClusterCollector(self.stats))

    def stats(self) -> ClusterStats:
        """How well the others are informed."""
        if self._publisher is None:
            return ClusterStats(connected=False, published=0, dropped=0, lag_seconds=0.0)
        return self._publisher.stats()

    async def _take_part(self, app: web.Application) -> AsyncIterator[None]:
        beginning = asyncio.create_task(self._begin(app[BACKEND]))
        yield
        beginning.cancel()
        if self._publisher is not None:
            await self._publisher.close()

    async def _begin(self, backend: Backend) -> None:
        await asyncio.wait([backend.loading])
        if backend.stats() is not None:  # else it has failed
            serving = backend.serving
            self._publisher = Publisher(
                self._server, self._keys, self.outbox, lambda: self._describe(backend, serving)
            )
            self._publisher.start()

    def _describe(self, backend: Backend, serving: Serving) -> Replica:
        stats = serving.stats()
        return Replica(
            id=self.url.partition("://")[2],
            epoch=self._epoch,
            url=self.url,
            models=serving.model_names,
            fingerprint=serving.model.fingerprint,
            block_size=stats.block_size,
            running=stats.running,
            waiting=stats.waiting,
            draining=backend.ready() is not None,
        )


def _default_url(settings: ServeSettings) -> str:
    """The address it listens on, or this machine's name where that is every address."""
    host = settings.host
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
