"""A router's routes for those who run it: health, models, metrics, the caches of all replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import hdrs, web

from ragcache.cluster.replica import Replica
from ragcache.errors import EngineUnavailable
from ragcache.gateway.middleware import REQUEST_ID
from ragcache.gateway.operations import readiness
from ragcache.gateway.route.forward import Forwarder, target
from ragcache.gateway.route.headers import end_to_end

TIMEOUT = aiohttp.ClientTimeout(total=10.0)
FORWARDER = web.AppKey("forwarder", Forwarder)


async def forward(request: web.Request) -> web.StreamResponse:
    """Whatever a replica answers."""
    return await request.app[FORWARDER].answer(request)


async def ready(request: web.Request) -> web.Response:
    """GET /ready: requests will be answered; 503 with the reason when not."""
    return readiness(request.app[FORWARDER].ready())


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: Prometheus text, or OpenMetrics where the scraper prefers it."""
    forwarder = request.app[FORWARDER]
    forwarder.gauge()
    page, content_type = forwarder.metrics.exposition(request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=page, headers={hdrs.CONTENT_TYPE: content_type})


async def models(request: web.Request) -> web.Response:
    """GET /v1/models: those of all replicas."""
    replies = await _ask(request, request.app[FORWARDER].fleet.usable())
    lists = [reply.body["data"] for reply in replies if reply.status == 200]
    if not lists:
        return _best(replies)
    data = list({each["id"]: each for models in lists for each in models}.values())
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return web.json_response({"object": "list", "data": data, **page})


async def of_any(request: web.Request) -> web.Response:
    """What one replica knows and the others do not: a model, why a prompt missed."""
    return _best(await _ask(request, request.app[FORWARDER].fleet.usable()))


async def cache_stats(request: web.Request) -> web.Response:
    """GET /cache/stats: what every replica says, by its id."""
    replies = await _ask(request, request.app[FORWARDER].fleet.usable())
    return web.json_response({"replicas": {reply.replica.id: reply.body for reply in replies}})


async def cache_reset(request: web.Request) -> web.Response:
    """POST /cache/reset: at every replica that is known; 502 where one of them did not do it."""
    forwarder = request.app[FORWARDER]
    replies = await _ask(request, forwarder.fleet.known())
    forwarder.router.expect_nothing()
    dropped = {reply.replica.id: reply.dropped for reply in replies}
    done = None not in dropped.values()
    total = sum(blocks or 0 for blocks in dropped.values())
    body = {"reset": done, "blocks": total, "replicas": dropped}
    return web.json_response(body, status=200 if done else 502)


@dataclass(frozen=True, slots=True)
class Reply:
    """What one replica answered; status 0 where it did not."""

    replica: Replica
    status: int = 0
    body: Any = None

    @property
    def dropped(self) -> int | None:
        """The blocks of a reset that was done."""
        return self.body["blocks"] if self.status == 200 else None


def _best(replies: Iterable[Reply]) -> web.Response:
    """The answer of a replica that knows one, or else what any of them says."""
    said = sorted((reply for reply in replies if reply.status), key=lambda reply: reply.status)
    if not said:
        raise EngineUnavailable("no replica answers")
    return web.json_response(said[0].body, status=said[0].status)


async def _ask(request: web.Request, replicas: Iterable[Replica]) -> list[Reply]:
    """Put the same question to several replicas at once."""
    return await asyncio.gather(*(_ask_one(request, replica) for replica in replicas))


async def _ask_one(request: web.Request, replica: Replica) -> Reply:
    headers = end_to_end(request.headers)
    headers["x-request-id"] = request[REQUEST_ID]
    url = target(replica, request)
    http = request.app[FORWARDER].http
    try:
        async with http.request(request.method, url, headers=headers, timeout=TIMEOUT) as reply:
            return Reply(replica, reply.status, json.loads(await reply.read()))
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return Reply(replica)
