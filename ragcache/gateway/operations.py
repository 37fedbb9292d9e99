"""Routes for those who run the server: health, models, metrics, the cache."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import hdrs, web

from ragcache.gateway.backend import BACKEND
from ragcache.gateway.explanations import explanation_body
from ragcache.gateway.meter import METRICS
from ragcache.gateway.tenants import TENANT

if TYPE_CHECKING:
    from ragcache.serving import Serving


async def health(request: web.Request) -> web.Response:
    """GET /health: the process answers."""
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: requests will be answered; 503 with the reason when not."""
    return readiness(request.app[BACKEND].ready())


def readiness(reason: str | None) -> web.Response:
    """The answer of /ready; `reason` why not, or None."""
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
