"""The gateways that this process uses: one for each URL, one engine for each set of options."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from typing import Any, Protocol

from langchain_ragcache.background import BackgroundLoop
from langchain_ragcache.embedded import OwnEngine
from langchain_ragcache.http import HttpGateway, Site

Json = dict[str, Any]


class Gateway(Protocol):
    """Answers chat completions in OpenAI's words; raises `Refused`."""

    async def models(self) -> list[Json]:
        """What is served, the canonical name first."""

    async def complete(self, body: Json) -> Json:
        """The whole answer."""

    def stream(self, body: Json) -> AsyncGenerator[Json]:
        """The chunks of the answer."""

    async def count_tokens(self, body: Json) -> int:
        """The prompt tokens of a body."""


class Place:
    """A background loop, and the connections and engines that belong to it.

    Chat models hold none of them: they can be copied and pickled.
    """

    def __init__(self) -> None:
        self.loop = BackgroundLoop()
        self._lock = threading.Lock()
        self._open: dict[Hashable, Site | OwnEngine] = {}

    def http(self, base_url: str, headers: Mapping[str, str]) -> HttpGateway:
        """The gateway at a URL, spoken to with these headers."""
        return HttpGateway(self._get(base_url, lambda: Site(base_url)), headers)

    def embedded(self, model: str | None, options: Mapping[str, Any]) -> OwnEngine:
        """The engine in this process that serves `model` with these options."""
        key = (model, json.dumps(options, sort_keys=True, default=str))
        engine: OwnEngine = self._get(key, lambda: OwnEngine(model, options))
        return engine

    def close(self) -> None:
        """Stop engines, close connections, end the loop."""
        self.loop.close(self._close_all())

    async def _close_all(self) -> None:
        for resource in list(self._open.values()):
            await resource.close()

    def _get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._open:
                self._open[key] = make()
            return self._open[key]


_place: Place | None = None
_lock = threading.Lock()


def current_place() -> Place:
    """The one that this process uses, made when it is first asked for."""
    global _place
    with _lock:
        _place = _place or Place()
        return _place


def shutdown() -> None:
    """Stop embedded engines and close connections; the next call starts anew.

    Happens at the end of the process too. Calls that still run raise `ModelConnectionError`.
    """
    global _place
    with _lock:
        place, _place = _place, None
    if place is not None:
        place.close()


def _forget() -> None:
    """After a fork: neither threads nor connections are there any more."""
    global _place, _lock
    _place, _lock = None, threading.Lock()


atexit.register(shutdown)
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_forget)
