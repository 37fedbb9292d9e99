"""Routes for those who run the server: health, models, metrics, the cache."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs, web

from ragcache.errors import Conflict
from ragcache.gateway.backend import BACKEND
from ragcache.gateway.meter import METRICS

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
    data = [_model(serving, name) for name in serving.model_names]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return web.json_response({"object": "list", "data": data, **page})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    name = request.match_info["id"]
    return web.json_response(_model(request.app[BACKEND].serving_model(name), name))


def _model(serving: Serving, name: str) -> dict[str, Any]:
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
    """GET /cache/stats: how much of the prompts came from the cache, and what the pool holds."""
    stats = request.app[BACKEND].serving.stats()
    windows = request.app[METRICS].hit_rate
    total = stats.hit_tokens / stats.query_tokens if stats.query_tokens else None
    pool = stats.pool
    return web.json_response(
        {
            "hit_rate": {"1m": windows.over(60), "5m": windows.over(300), "total": total},
            "tokens": {
                "query": stats.query_tokens,
                "hit": stats.hit_tokens,
                "computed": stats.computed_tokens,
            },
            "pool": {
                "free": pool.free,
                "cached": pool.cached,
                "held": pool.held,
                "total": pool.total,
            },
            "block_size": stats.block_size,
            "evictions": stats.evictions,
            "preemptions": stats.preemptions,
            "running": stats.running,
            "waiting": stats.waiting,
        }
    )


async def cache_reset(request: web.Request) -> web.Response:
    """POST /cache/reset: forget every cached block; 409 while a request holds some."""
    if not await request.app[BACKEND].serving.reset_cache():
        raise Conflict("blocks are held by running requests; try again when none is running")
    return web.json_response({"reset": True})
