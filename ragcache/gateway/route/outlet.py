"""The client's side of an exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping

from aiohttp import web

from ragcache.gateway.failures import ANTHROPIC_ROUTE

STALLED = 60.0  # seconds that a write may take before the reader counts as gone


class Outlet:
    """Sends an answer on, be it in one piece or as events.

    Nothing is sent before a replica has something to say: until then, another one may say it
    instead, or the refusal may still have a status. Every method raises ConnectionAbortedError
    once the client is gone.
    """

    def __init__(self, request: web.Request) -> None:
        self.began = False  # whether a part of an answer was sent, more than keep-alives
        self._request = request
        self._stream: web.StreamResponse | None = None

    async def keep_alive(self, headers: Mapping[str, str], events: bytes) -> None:
        """Send events that say nothing yet."""
        if self._stream is None:
            self._stream = web.StreamResponse(headers=headers)
            await self._unless_gone(self._stream.prepare(self._request))
        await self._unless_gone(self._stream.write(events))

    async def send(self, headers: Mapping[str, str], events: bytes) -> None:
        """Send a part of an answer."""
        self.began = True
        await self.keep_alive(headers, events)

    async def end(self, headers: Mapping[str, str], rest: bytes) -> web.StreamResponse:
        """End a stream of events."""
        await self.send(headers, rest)
        assert self._stream is not None
        await self._unless_gone(self._stream.write_eof())
        return self._stream

    async def whole(
        self, status: int, headers: Mapping[str, str], body: bytes
    ) -> web.StreamResponse:
        """Send an answer in one piece; where a stream is open already, it is a failure."""
        if self._stream is None:
            return web.Response(status=status, headers=headers, body=body)
        return await self.end(headers, error_event(self._request.path, body))

    async def _unless_gone(self, write: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(STALLED):
                await write
        except ConnectionError as error:
            raise ConnectionAbortedError("the client has left") from error
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()  # closing would wait for the reader once more
            raise ConnectionAbortedError("the client does not read") from None


def error_event(path: str, body: bytes) -> bytes:
    """An error body (JSON without newlines) as an event of the stream of this route."""
    name = b"event: error\n" if path.startswith(ANTHROPIC_ROUTE) else b""
    return name + b"data: " + body + b"\n\n"
