from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from redis_pool import Pool, RedisServer
from scripted import make_gateway

__all__ = ["make_gateway"]

PACE = {
    "publisher.INTERVAL": 0.05,
    "publisher.RENEWAL": 1.0,
    "publisher.FAREWELL": 1,
    "follower.INTERVAL": 0.05,
    "follower.LEASES_EVERY": 0.2,
    "link.LONGEST_PAUSE": 0.3,
}


@pytest.fixture(autouse=True)
def faster(monkeypatch) -> None:
    """Everything happens as it does otherwise, but sooner."""
    for name, seconds in PACE.items():
        monkeypatch.setattr(f"ragcache.cluster.{name}", seconds)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
async def make_pool(redis_server) -> AsyncIterator[Callable[..., Pool]]:
    """Pools, on the server of the test if no other is named."""
    pools: list[Pool] = []

    def make(url: str = redis_server.url, name: str = "test") -> Pool:
        pools.append(Pool(url, name))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


@pytest.fixture
async def pool(make_pool) -> Pool:
    return make_pool()
