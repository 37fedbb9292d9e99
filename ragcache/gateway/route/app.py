"""The application of a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from ragcache.cluster.directory import Directory
from ragcache.cluster.router import Router
from ragcache.gateway.drain import DRAIN, Drain, count_under_way, part_from_client
from ragcache.gateway.middleware import identify, shape_errors, show_request_id, tell
from ragcache.gateway.operations import health
from ragcache.gateway.record import RECORD
from ragcache.gateway.route import operations
from ragcache.gateway.route.fleet import Fleet
from ragcache.gateway.route.forward import Forwarder
from ragcache.gateway.route.metrics import RouteMetrics
from ragcache.gateway.route.operations import FORWARDER, forward
from ragcache.gateway.route.reading import Encode
from ragcache.gateway.tenants import TENANTS, Tenants, authenticate
from ragcache.gateway.tracing import TRACER, Tracer

CONNECT = 2.0  # seconds
_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # of aiohttp's client

ROUTES = (
    web.post("/v1/chat/completions", forward, name="chat"),
    web.post("/v1/chat/completions/count_tokens", forward),
    web.post("/v1/completions", forward, name="completions"),
    web.post("/v1/messages", forward, name="messages"),
    web.post("/v1/messages/count_tokens", forward),
    web.get("/v1/models", operations.models),
    web.get("/v1/models/{id:.+}", operations.of_any),
    web.get("/health", health),
    web.get("/ready", operations.ready),
    web.get("/metrics", operations.metrics),
    web.get("/cache/stats", operations.cache_stats),
    web.get("/cache/explain/{id}", operations.of_any),
    web.post("/cache/reset", operations.cache_reset),
    web.post("/reset_prefix_cache", operations.cache_reset),
    web.get("/openapi.json", forward),
)


@web.middleware
async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the answers of the routes that have a name, by their status."""
    request[RECORD].api = request.match_info.route.name
    response = await handler(request)
    if (api := request[RECORD].api) is not None:
        answers = request.app[FORWARDER].metrics.answers
        answers.labels(api, response.status).inc()
    return response


def create_app(
    loading: asyncio.Future[Encode | None],
    *,
    urls: Sequence[str] = (),
    directory: Directory | None = None,
    api_keys: Sequence[str] = (),
    max_body_size: int = 64 * 2**20,
    max_requests: int = 1000,
    tracer: Tracer | None = None,
) -> web.Application:
    """A router for replicas at `urls`, and for those of a directory.

    `loading` gives what reads prompts, and may still be under way. `api_keys` are those of the
    replicas, `max_body_size` is in bytes. To be called in a running event loop.
    """
    app = web.Application(
        middlewares=[identify, tell, count, shape_errors, count_under_way, authenticate],
        client_max_size=max_body_size,
    )
    metrics, router = RouteMetrics(), Router(directory)
    fleet = Fleet(urls, directory, router, metrics.forget)
    app[FORWARDER] = Forwarder(router, fleet, metrics, _client(), loading, max_requests)
    app[TENANTS] = Tenants(api_keys)
    app[DRAIN] = Drain(app[FORWARDER])
    app[TRACER] = tracer
    app.cleanup_ctx.append(_probing)
    app.on_response_prepare.extend((show_request_id, part_from_client))
    app.add_routes(ROUTES)
    return app


async def _probing(app: web.Application) -> AsyncIterator[None]:
    forwarder = app[FORWARDER]
    async with forwarder.http:
        probing = asyncio.create_task(forwarder.fleet.run())
        yield
        probing.cancel()
        with suppress(asyncio.CancelledError):
            await probing


def _client() -> aiohttp.ClientSession:
    """Passes everything on as it is, and holds as many connections as there are requests."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_AUTOMATIC,
    )
