"""Routes for those who run the server: health, models, metrics, the cache."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs, web

from ragcache.gateway.backend import BACKEND
from ragcache.gateway.explanations import explanation_body
from ragcache.gateway.meter import METRICS
from ragcache.gateway.tenants import TENANT
from ragcache.types import EngineStats, PoolCounts

if TYPE_CHECKING:
    from ragcache.serving import Serving


async def health(request: web.Request) -> web.Response:
    """GET /health: the process answers."""
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: requests will be answered; 503 with the reason when not."""
    reason = request.app[BACKEND].ready()
    body = {"ready": reason is None, "reason": reason}
    return web.json_response(body, status=503 if reason else 200)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: Prometheus text, or OpenMetrics where the scraper prefers it."""
    accept = request.headers.get(hdrs.ACCEPT, "")
    page, content_type = request.app[METRICS].exposition(accept)
    return web.Response(body=page, headers={hdrs.CONTENT_TYPE: content_type})


async def models(request: web.Request) -> web.Response:
    """GET /v1/models, in one shape that OpenAI's and Anthropic's clients both read."""
    serving = request.app[BACKEND].serving
    data = [model_body(serving, name) for name in serving.model_names]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return web.json_response({"object": "list", "data": data, **page})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    name = request.match_info["id"]
    return web.json_response(model_body(request.app[BACKEND].serving_model(name), name))


def model_body(serving: Serving, name: str) -> dict[str, Any]:
    """An entry of the list of models."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": serving.created,
        "created_at": datetime.fromtimestamp(serving.created, UTC).isoformat(),
        "owned_by": "ragcache",
        "display_name": name,
        "max_input_tokens": serving.max_model_len,
        "max_tokens": serving.max_model_len,
        "lifecycle": "active",
    }


async def cache_stats(request: web.Request) -> web.Response:
    """GET /cache/stats: how much of the caller's prompts came from the cache.

    Without API keys everything is the caller's, and the state of pool and engine is shown too.
    """
    stats = request.app[BACKEND].serving.stats()
    hits = request.app[METRICS].hit_rates[request[TENANT]]
    body = {
        "hit_rate": {"1m": hits.over(60), "5m": hits.over(300), "total": hits.total},
        "tokens": {"query": hits.query_tokens, "hit": hits.hit_tokens},
        "block_size": stats.block_size,
    }
    if not request[TENANT]:
        body |= _engine(stats)
    return web.json_response(body)


def _engine(stats: EngineStats) -> dict[str, Any]:
    body: dict[str, Any] = {
        "pool": {**_blocks(stats.pool), "retained": stats.retained},
        "computed_tokens": stats.computed_tokens,
        "evictions": stats.evictions,
        "preemptions": stats.preemptions,
        "running": stats.running,
        "waiting": stats.waiting,
    }
    if stats.host is not None:
        body["host"] = {
            "pool": _blocks(stats.host.pool),
            "hit_tokens": stats.host.hit_tokens,
            "evictions": stats.host.evictions,
            "swapped_out": stats.host.swapped_out,
            "swapped_in": stats.host.swapped_in,
        }
    return body


def _blocks(pool: PoolCounts) -> dict[str, int]:
    return {"free": pool.free, "cached": pool.cached, "held": pool.held, "total": pool.total}


async def cache_explain(request: web.Request) -> web.Response:
    """GET /cache/explain/{id}: why the prompt behind a response hit as far as it did."""
    serving = request.app[BACKEND].serving
    response_id = request.match_info["id"]
    explanation = serving.explanation(response_id, request[TENANT])
    body = explanation_body(explanation, serving.stats().block_size)
    return web.json_response({"id": response_id, **body})


async def cache_reset(request: web.Request) -> web.Response:
    """POST /cache/reset: forget all that is cached for the caller.

    Requests that run keep their blocks, and publish no more.
    """
    dropped = await request.app[BACKEND].serving.drop_cache(request[TENANT])
    return web.json_response({"reset": True, "blocks": dropped})
