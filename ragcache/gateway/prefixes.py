"""The prefixes that each tenant's prompts share most, at hand without a wait for the engine."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from ragcache.errors import EngineUnavailable
from ragcache.gateway.backend import Backend
from ragcache.types import EngineStats, HotPrefix

_MOST = 12
_FRESH = 1.0  # seconds before the engine is asked again
_PATIENCE = 0.25  # seconds to wait for it; a step of it may take longer


@dataclass(slots=True)
class _Known:
    """What the engine last said to a tenant, and in what state it was."""

    prefixes: Sequence[HotPrefix] = ()
    stats: EngineStats | None = None
    asked_at: float = 0.0
    asking: asyncio.Task[None] | None = None


class HotPrefixes:
    """Asks the engine at most once a second for each tenant, and not while nothing has changed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._known: defaultdict[str, _Known] = defaultdict(_Known)

    async def of(self, tenant: str) -> Sequence[HotPrefix]:
        """A tenant's hottest prefixes; those from before where the engine is slow to answer."""
        known = self._known[tenant]
        if known.asking is None and self._aged(known):
            known.asking = asyncio.create_task(self._ask(tenant, known))
        if (asking := known.asking) is not None:
            await asyncio.wait([asking], timeout=_PATIENCE)
            if asking.done():
                asking.result()  # raises what the engine could not answer
        return known.prefixes

    def _aged(self, known: _Known) -> bool:
        changed = self._backend.stats() != known.stats
        return changed and time.monotonic() - known.asked_at >= _FRESH

    async def _ask(self, tenant: str, known: _Known) -> None:
        known.asked_at = time.monotonic()
        try:
            known.prefixes = await self._backend.serving.hot_prefixes(tenant, _MOST)
            known.stats = self._backend.stats()
        except EngineUnavailable:
            known.prefixes = ()  # and with the engine, what it had cached
        finally:
            known.asking = None


HOT_PREFIXES = web.AppKey("hot_prefixes", HotPrefixes)
