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
from langchain_ragcache.http import HttpGateway

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

    async def close(self) -> None:
        """Give everything back."""


class Gateways:
    """The background loop and the gateways on it, made when they are first asked for.

    Chat models hold no connection and no engine themselves: they can be copied and pickled.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as after a fork: neither threads nor connections are there any more."""
        self._lock = threading.Lock()
        self._loop: BackgroundLoop | None = None
        self._open: dict[Hashable, Gateway] = {}

    @property
    def loop(self) -> BackgroundLoop:
        """Where all requests run."""
        with self._lock:
            self._loop = self._loop or BackgroundLoop()
            return self._loop

    def http(self, base_url: str, headers: Mapping[str, str]) -> Gateway:
        """The gateway at a URL."""
        key = (base_url, *sorted(headers.items()))
        return self._get(key, lambda: HttpGateway(base_url, headers))

    def embedded(self, model: str | None, options: Mapping[str, Any]) -> Gateway:
        """The engine in this process that serves `model` with these options."""
        key = (model, json.dumps(options, sort_keys=True, default=str))
        return self._get(key, lambda: OwnEngine(model, options))

    def close(self) -> None:
        """Stop engines, close connections, end the loop; requests that still run fail."""
        with self._lock:
            loop, self._loop = self._loop, None
            gateways, self._open = self._open, {}
        if loop is not None:
            for gateway in gateways.values():
                loop.wait(gateway.close())
            loop.close()

    def _get(self, key: Hashable, make: Callable[[], Gateway]) -> Gateway:
        with self._lock:
            if key not in self._open:
                self._open[key] = make()
            return self._open[key]


gateways = Gateways()


def shutdown() -> None:
    """Stop embedded engines and close connections; the next call starts anew.

    Happens at the end of the process too. Requests that still run fail.
    """
    gateways.close()


atexit.register(shutdown)
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=gateways.forget)
