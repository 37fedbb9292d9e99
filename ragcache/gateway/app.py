"""The application, and the loop that serves it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from aiohttp import web

from ragcache.errors import ConfigError
from ragcache.gateway import operations, stats
from ragcache.gateway.anthropic import routes as anthropic
from ragcache.gateway.backend import BACKEND, Backend
from ragcache.gateway.bodies import INTAKE, Intake
from ragcache.gateway.connection import Connection
from ragcache.gateway.dashboard.data import dashboard_data
from ragcache.gateway.dashboard.load import LOAD, Load, watch_load
from ragcache.gateway.dashboard.page import dashboard
from ragcache.gateway.drain import DRAIN, LAST_WORDS, Drain, count_under_way, part_from_client
from ragcache.gateway.meter import METRICS
from ragcache.gateway.middleware import identify, measure, shape_errors, show_request_id, tell
from ragcache.gateway.openai import routes as openai
from ragcache.gateway.openapi import DESCRIPTION, Description, openapi
from ragcache.gateway.prefixes import HOT_PREFIXES, HotPrefixes
from ragcache.gateway.tenants import OPEN_PATHS, TENANTS, Tenants, authenticate
from ragcache.gateway.tracing import TRACER, Tracer
from ragcache.gateway.watchdog import watch
from ragcache.metrics import Metrics

if TYPE_CHECKING:
    from ragcache.serving import Serving

log = logging.getLogger(__name__)

ROUTES = (
    web.post("/v1/chat/completions", openai.chat_completions, name="chat"),
    web.post("/v1/chat/completions/count_tokens", openai.count_tokens),
    web.post("/v1/completions", openai.completions, name="completions"),
    web.post("/v1/messages", anthropic.messages, name="messages"),
    web.post("/v1/messages/count_tokens", anthropic.count_tokens),
    web.get("/v1/models", operations.models),
    web.get("/v1/models/{id:.+}", operations.model),
    web.get("/health", operations.health),
    web.get("/ready", operations.ready),
    web.get("/metrics", operations.metrics),
    web.get("/cache/stats", stats.cache_stats),
    web.get("/cache/explain/{id}", operations.cache_explain),
    web.post("/cache/reset", operations.cache_reset),
    web.post("/reset_prefix_cache", operations.cache_reset),
    web.get("/dashboard", dashboard),
    web.get("/dashboard/data", dashboard_data),
    web.get("/openapi.json", openapi),
)


def create_app(
    loading: asyncio.Future[Serving],
    *,
    api_keys: Sequence[str] = (),
    max_body_size: int = 64 * 2**20,
    metrics_compat: Literal["vllm"] | None = None,
    tracer: Tracer | None = None,
) -> web.Application:
    """The gateway before `loading`, which may still be under way: until then it answers 503.

    `api_keys` are written as `Tenants` has them; `max_body_size` is in bytes.
    Raises ConfigError for a key that cannot be used.
    """
    app = web.Application(
        middlewares=[identify, tell, shape_errors, measure, count_under_way, authenticate],
        client_max_size=max_body_size,
    )
    app[BACKEND] = Backend(loading)
    app[METRICS] = Metrics(app[BACKEND], metrics_compat)
    app[HOT_PREFIXES] = HotPrefixes(app[BACKEND])
    app[LOAD] = Load(app[BACKEND])
    app.cleanup_ctx.extend((watch_load, watch))
    app[TENANTS] = Tenants(api_keys)
    app[INTAKE] = Intake(max_body_size)
    app[DRAIN] = Drain(app[BACKEND])
    app[TRACER] = tracer
    app[DESCRIPTION] = Description(ROUTES, OPEN_PATHS)
    app.on_response_prepare.extend((show_request_id, part_from_client))
    app.add_routes(ROUTES)
    return app


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Answer on host:port (0 picks a free one) until the block ends; yields the base URL.

    Raises ConfigError when the address cannot be had.
    """
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # else a client that leaves would not stop its generation
        shutdown_timeout=LAST_WORDS,
    )
    await runner.setup()
    loop = asyncio.get_running_loop()
    connection = partial(
        Connection,
        cast(web.Server, runner.server),
        loop=loop,
        access_log=None,  # type: ignore[arg-type]  # the line of each request is our own
        auto_decompress=False,  # else a small body could become a huge one, on the event loop
    )
    try:
        try:
            server = await loop.create_server(connection, host, port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        with closing(server):
            bound = server.sockets[0].getsockname()[1]
            yield f"http://{f'[{host}]' if ':' in host else host}:{bound}"
    finally:
        await runner.cleanup()


async def serve(
    app: web.Application,
    loading: asyncio.Future[Any],
    host: str,
    port: int,
    drain_timeout: float = 30.0,
) -> None:
    """Serve until SIGINT or SIGTERM, then let requests finish for `drain_timeout` seconds.

    A second signal ends the process at once. Where the application can serve no more it ends as
    though a signal had come, and the reason is raised.
    Raises ConfigError for a busy port, and whatever `loading`, without which the application is not
    ready, raises.
    """
    drain = app[DRAIN]
    async with listening(app, host, port) as url:
        _at_signal(drain.tell)
        log.info("listening on %s", url)
        awaited: set[asyncio.Future[Any]] = {drain.told, loading}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            log.info("ready")
        await drain.told
        await drain.run(drain_timeout)
    if drain.fault is not None:
        raise drain.fault


def _at_signal(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
