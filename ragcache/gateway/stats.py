"""The hit-rate endpoint."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ragcache.gateway.backend import BACKEND
from ragcache.gateway.meter import METRICS
from ragcache.gateway.prefixes import HOT_PREFIXES
from ragcache.gateway.tenants import TENANT
from ragcache.metrics.hit_rate import HitRate
from ragcache.metrics.tally import Tally
from ragcache.types import EngineStats, HotPrefix, PoolCounts


async def cache_stats(request: web.Request) -> web.Response:
    """GET /cache/stats: how much of the caller's prompts came from the cache.

    Without API keys everything is the caller's, and the state of pool and engine is shown too.
    """
    return web.json_response(await stats_body(request.app, request[TENANT]))


async def stats_body(app: web.Application, tenant: str) -> dict[str, Any]:
    """What `tenant` may see; raises EngineUnavailable while the model is loading."""
    stats = app[BACKEND].serving.stats()
    tally = app[METRICS].tallies[tenant]
    prefixes = await app[HOT_PREFIXES].of(tenant)
    body = {
        "hit_rate": _rates(tally.whole),
        "tokens": _tokens(tally.whole),
        "segments": {
            name: {**_tokens(each), "hit_rate": _rates(each)}
            for name, each in tally.segments.items()
        },
        "saved": _saved(tally, stats),
        "prefixes": [_prefix(each) for each in prefixes],
        "block_size": stats.block_size,
    }
    return body if tenant else body | _engine(stats)


def _rates(hits: HitRate) -> dict[str, float | None]:
    return {"1m": hits.over(60), "5m": hits.over(300), "total": hits.total.rate}


def _tokens(hits: HitRate) -> dict[str, int]:
    return {"query": hits.total.query, "hit": hits.total.hit}


def _saved(tally: Tally, stats: EngineStats) -> dict[str, Any]:
    """What the hits have spared: their tokens, at the best pace that the engine has shown."""
    tokens, rate = tally.whole.total.hit, stats.prefill_rate or None
    return {"tokens": tokens, "seconds": tokens / rate if rate else None, "prefill_rate": rate}


def _prefix(prefix: HotPrefix) -> dict[str, Any]:
    now = time.monotonic()
    left = prefix.kept_until - now if prefix.kept_until else 0.0
    return {
        "fingerprint": _fingerprint(prefix.name),
        "parent": prefix.parent and _fingerprint(prefix.parent),
        "tokens": prefix.tokens,
        "hits": prefix.hits,
        "hit_tokens": prefix.hit_tokens,
        "age": now - prefix.published_at,
        "retention": left if left > 0 else None,
    }


def _fingerprint(name: bytes) -> str:
    return name.hex()[:12]


def _engine(stats: EngineStats) -> dict[str, Any]:
    body: dict[str, Any] = {
        "pool": {**_blocks(stats.pool), "retained": stats.retained},
        "computed_tokens": stats.computed_tokens,
        "drafts": {"tokens": stats.drafted_tokens, "accepted": stats.accepted_tokens},
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
