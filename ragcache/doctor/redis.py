"""Whether the Redis server answers through which replicas know of each other."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache.cluster import lease
from ragcache.cluster.keys import Keys
from ragcache.cluster.server import FAILURES, Server


@dataclass(frozen=True, slots=True)
class RedisState:
    """How many replicas live there, or why nobody can know."""

    server: str
    replicas: int | None
    error: str | None


async def ask(url: str, cluster: str) -> RedisState:
    """Ask once; raises ConfigError for a URL that names no server."""
    server = Server(url)
    try:
        async with server.client() as client:
            leases = await lease.read(client, Keys(cluster))
    except FAILURES as error:
        return RedisState(str(server), None, str(error) or type(error).__name__)
    return RedisState(str(server), len(leases), None)
