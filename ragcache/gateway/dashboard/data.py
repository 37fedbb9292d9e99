"""What the dashboard shows: the state of now, the last ten minutes, the latest misses."""

from __future__ import annotations

from itertools import chain
from typing import Any

from aiohttp import web

from ragcache.errors import EngineUnavailable
from ragcache.gateway.backend import BACKEND
from ragcache.gateway.dashboard.load import LOAD, Load
from ragcache.gateway.meter import METRICS
from ragcache.gateway.stats import stats_body
from ragcache.gateway.tenants import TENANT
from ragcache.metrics.tally import Miss, Tally, percentile

_MISSES = 12


async def dashboard_data(request: web.Request) -> web.Response:
    """GET /dashboard/data: what the page shows; as in `/cache/stats`, the caller's own."""
    app, tenant = request.app, request[TENANT]
    tally, backend = app[METRICS].tallies[tenant], app[BACKEND]
    try:
        stats = await stats_body(app, tenant)
    except EngineUnavailable:  # the page is there before the model is
        stats = None
    reason = backend.ready()
    body = {
        "model": backend.model_name,
        "ready": reason is None,
        "reason": reason,
        "stats": stats,
        "ttft": _waits(tally),
        "history": _history(tally) | ({} if tenant else _busy(app[LOAD])),
        "misses": [_miss(tally, miss) for miss in list(tally.misses)[: -_MISSES - 1 : -1]],
    }
    return web.json_response(body)


def _waits(tally: Tally) -> dict[str, Any]:
    """Seconds to the first token in the last minute, and in the last ten as in `_history`."""
    waits, line = tally.waits, tally.waits.line()
    latest = sorted(chain.from_iterable(waits.last(60 // waits.seconds)))
    return {
        "1m": {"p50": percentile(latest, 50), "p95": percentile(latest, 95)},
        "seconds": waits.seconds,
        "p50": [each and percentile(each, 50) for each in line],
        "p95": [each and percentile(each, 95) for each in line],
    }


def _history(tally: Tally) -> dict[str, Any]:
    """A number for each slot, oldest first; null where nothing came."""
    line = tally.history.line()
    return {
        "seconds": tally.history.seconds,
        "query": [hits and hits.query for hits in line],
        "hit": [hits and hits.hit for hits in line],
    }


def _busy(load: Load) -> dict[str, Any]:
    load.now()
    line = load.line()
    return {
        "running": [stats and stats.running for stats in line],
        "waiting": [stats and stats.waiting for stats in line],
    }


def _miss(tally: Tally, miss: Miss) -> dict[str, Any]:
    why = miss.explanation
    return {
        "id": miss.request_id,
        "age": tally.clock() - miss.at,
        "reason": why.reason,
        "segment": why.segment,
        "token": why.token,
        "prompt_tokens": why.prompt_tokens,
        "hit_tokens": why.hit_tokens,
        "lost_tokens": why.lost_tokens,
    }
