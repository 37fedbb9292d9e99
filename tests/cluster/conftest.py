from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest
from redis_pool import Pool, RedisServer


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
async def make_pool(redis_server) -> AsyncIterator[Callable[..., Pool]]:
    async with AsyncExitStack() as stack:
        yield lambda url=redis_server.url, name="test": Pool(url, name, stack)


@pytest.fixture
async def pool(make_pool) -> Pool:
    return make_pool()
