"""API keys, and the tenant that each of them stands for."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from ragcache.errors import Unauthorized

# Probes, scrapers and browsers bring no key, and what they read tells nothing about a tenant.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json", "/dashboard"})


class Tenants:
    """The accepted API keys; without any, everybody is the tenant \"\"."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request: a digest of its key, never the key. Raises Unauthorized."""
        if not self._digests:
            return ""
        key = _presented(headers)
        if not key:
            raise Unauthorized(
                "no API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            )
        digest = _digest(key)
        if not any(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthorized("incorrect API key")
        return digest[:16]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _presented(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


TENANTS = web.AppKey("tenants", Tenants)
TENANT = web.RequestKey("tenant", str)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Find the tenant, or answer 401."""
    if request.path not in OPEN_PATHS:
        request[TENANT] = request.app[TENANTS].tenant(request.headers)
    return await handler(request)
