"""What a router expects is what replicas find: keys, salts, both wires, over a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack

import aiohttp
import pytest
from redis_pool import RedisServer, eventually
from route_fleet import free_port
from scripted import BLOCK

from ragcache.config import ServeSettings
from ragcache.gateway.app import listening
from ragcache.gateway.route.app import create_app
from ragcache.gateway.route.following import Following
from ragcache.gateway.route.operations import FORWARDER
from ragcache.routing import load_encode

KEYS = ["sk-of-mine", "sk-of-another"]
SYSTEM = "You keep a lighthouse, and write down what passes. " * 12
TURNS = [{"role": "user", "content": "Who are you?"}]
TOOLS = [{"name": "look", "description": "Look out.", "input_schema": {"type": "object"}}]
BODIES = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": SYSTEM}, *TURNS]},
    ),
    "chat stream": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": f"Streamed. {SYSTEM}"}, *TURNS],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "text": ("/v1/completions", {"prompt": SYSTEM}),
    "texts": ("/v1/completions", {"prompt": [f"One. {SYSTEM}", list(range(100, 180))]}),
    "message": ("/v1/messages", {"system": f"Anthropic's. {SYSTEM}", "messages": TURNS}),
    "message stream": (
        "/v1/messages",
        {"system": f"Streamed there. {SYSTEM}", "messages": TURNS, "tools": TOOLS, "stream": True},
    ),
    "salted": ("/v1/completions", {"prompt": SYSTEM, "cache_salt": "s"}),
}


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    server = RedisServer()
    server.start()
    yield server.url
    server.close()


@pytest.fixture(scope="module")
def replicas(make_gateway, redis_url):
    with ExitStack() as stack:
        gateways = []
        for port in (free_port(), free_port()):
            settings = ServeSettings(redis_url=redis_url, port=port, max_batch_tokens=2048)
            made = make_gateway(settings=settings, port=port, api_keys=KEYS)
            gateways.append(stack.enter_context(made))
        yield gateways


@pytest.fixture(scope="module")
def encode():
    return load_encode(None)


class Routed:
    """A router, and what it has compared."""

    def __init__(self, app, http) -> None:
        self.forwarder = app[FORWARDER]
        self.http = http

    def compared(self) -> tuple[float, float]:
        page = self.forwarder.metrics.exposition("")[0].decode().splitlines()
        names = ("predicted_hit_tokens_total{", "reported_hit_tokens_total{")
        predicted, reported = (
            sum(float(x.rsplit(" ", 1)[1]) for x in page if x.startswith(f"ragcache_route_{name}"))
            for name in names
        )
        return predicted, reported

    async def ask(self, path, body, key=KEYS[0]) -> tuple[float, float]:
        """Tokens that were expected to be cached, and those that were."""
        before = self.compared()
        body = {"model": "tiny", "max_tokens": 4, **body}
        async with self.http.post(path, json=body, headers={"x-api-key": key}) as response:
            assert response.status == 200, await response.text()
            await response.read()
        predicted, reported = (now - was for now, was in zip(self.compared(), before, strict=True))
        return predicted, reported


@pytest.fixture
async def start_router(
    replicas, redis_url, encode
) -> AsyncIterator[Callable[[], Awaitable[Routed]]]:
    async with AsyncExitStack() as stack:

        async def start() -> Routed:
            loading = asyncio.get_running_loop().create_future()
            loading.set_result(encode)
            following = Following(redis_url, "default")
            app = create_app(loading, directory=following.directory, api_keys=KEYS)
            following.join(app)
            url = await stack.enter_async_context(listening(app, "127.0.0.1", 0))
            http = await stack.enter_async_context(aiohttp.ClientSession(url))
            await eventually(lambda: len(app[FORWARDER].fleet.usable()) == 2)
            return Routed(app, http)

        yield start


@pytest.fixture
async def routed(start_router) -> Routed:
    return await start_router()


@pytest.mark.parametrize("name", BODIES)
async def test_what_is_expected_is_what_is_found(routed, name):
    path, body = BODIES[name]
    await routed.ask(path, body)
    predicted, reported = await routed.ask(path, body)
    assert predicted == reported >= 4 * BLOCK


async def test_nothing_is_expected_for_another_key_or_salt(routed):
    path, body = "/v1/completions", {"prompt": f"Whose? {SYSTEM}"}
    await routed.ask(path, body)
    for options in ({"key": KEYS[1]}, {}):
        salted = body if options else {**body, "cache_salt": "another"}
        assert await routed.ask(path, salted, **options) == (0, 0)
    predicted, reported = await routed.ask(path, body)
    assert predicted == reported > 0


async def test_routers_learn_from_replicas_and_not_from_what_they_sent_themselves(start_router):
    first, second = await start_router(), await start_router()
    path, body = "/v1/completions", {"prompt": f"Shared. {SYSTEM}"}
    await first.ask(path, body)
    await eventually(lambda: known(second) == known(first))
    late = await start_router()
    await eventually(lambda: known(late) == known(first))
    for router in (second, late):
        predicted, reported = await router.ask(path, body)
        assert predicted == reported > 0


def known(routed: Routed) -> dict[str, set[bytes]]:
    """The blocks of all replicas, as this router's directory has them."""
    views = routed.forwarder.router._directory._views
    return {each: set(view.blocks.on_host) for each, view in views.items()}
