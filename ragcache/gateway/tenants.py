"""API keys, and the tenant that each of them stands for."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from ragcache.errors import ConfigError, Unauthorized
from ragcache.gateway.record import RECORD

# Probes, scrapers and browsers bring no key, and what they read tells nothing about a tenant.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json", "/dashboard"})
# Asked for every few seconds by whoever watches the server, to its end.
POLLED_PATHS = OPEN_PATHS | {"/cache/stats", "/dashboard/data"}

_NAME = re.compile(r"[\w.-]+", re.ASCII)

log = logging.getLogger(__name__)


class Tenants:
    """The accepted API keys, each written as `KEY` or `TENANT:KEY`; none: everybody is \"\".

    A key without a tenant is a tenant of its own. Neither keys nor names are kept or shown, only
    digests of them. Raises ConfigError, by the number of the key, for one that cannot be used.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._tenants: dict[str, str] = {}  # by the digest of the key
        for number, entry in enumerate(keys, 1):
            try:
                self._add(entry)
            except ValueError as error:
                raise ConfigError(f"API key number {number}: {error}") from None
        if self._tenants:
            names = set(self._tenants.values())
            log.info("API keys: %d, of %d tenants", len(self._tenants), len(names))

    def _add(self, entry: str) -> None:
        name, colon, key = entry.strip().rpartition(":")
        if not key:
            raise ValueError("the key is empty")
        if colon and not _NAME.fullmatch(name):
            raise ValueError("the tenant in front of ':' must be letters, digits, '_', '.' or '-'")
        tenant = _digest(f"tenant:{name}")[:16] if colon else _slow_digest(key)
        if self._tenants.setdefault(_digest(key), tenant) != tenant:
            raise ValueError("another tenant has this key already")

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request, as a digest. Raises Unauthorized."""
        if not self._tenants:
            return ""
        key = _presented(headers)
        if not key:
            raise Unauthorized(
                "no API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            )
        # How long it takes to find a digest tells nothing about a key.
        tenant = self._tenants.get(_digest(key))
        if tenant is None:
            raise Unauthorized("incorrect API key")
        return tenant


def read_keys(path: Path) -> list[str]:
    """The keys of a file: one on each line, but for those that are empty or begin with `#`.

    Raises ConfigError when it cannot be read, or has none: it would open the server to everybody.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()  # editors may put a mark in front
    except OSError as error:
        raise ConfigError(f"api_keys_file: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_keys_file: {path}: is not UTF-8") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"api_keys_file: {path}: has no key")
    return keys


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _slow_digest(key: str) -> str:
    """What may be shown of a key: logs and Redis have it, and who reads them may try out keys.

    The salt is the same everywhere, since all replicas of a pool must name a tenant alike.
    """
    secret = key.encode("utf-8", "surrogateescape")
    return hashlib.scrypt(secret, salt=b"ragcache tenant", n=2**14, r=8, p=1, dklen=8).hex()


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
        request[RECORD].tenant = request[TENANT]
    return await handler(request)
