"""What a router knows of its replicas through Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from ragcache.cluster.directory import Directory
from ragcache.cluster.follower import Follower
from ragcache.cluster.keys import Keys
from ragcache.cluster.server import Server


class Following:
    """Follows a pool of replicas. Raises ConfigError for a URL of Redis that is wrong."""

    def __init__(self, url: str, cluster_name: str) -> None:
        self.directory = Directory()
        self._follower = Follower(Server(url), Keys(cluster_name), self.directory)

    def join(self, app: web.Application) -> None:
        """Follow for as long as this application runs."""
        app.cleanup_ctx.append(self._follow)

    async def _follow(self, _: web.Application) -> AsyncIterator[None]:
        self._follower.start()
        yield
        await self._follower.close()
