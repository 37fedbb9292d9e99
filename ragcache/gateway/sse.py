"""Answers on their way: server-sent events (WHATWG HTML, 9.2), or in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Self

from aiohttp import web

KEEP_ALIVE = 15.0  # seconds of silence before a comment, below the time-outs of usual proxies
STALLED = 60.0  # seconds that a write may take before the reader counts as gone

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect a buffer full before it forwards
}


async def send_whole(request: web.Request, response: web.Response) -> web.Response:
    """Send an answer in one piece, to its last byte; raises ConnectionError as a stream does.

    aiohttp would only begin when the handler, and with it all that counts the request, has ended.
    """
    await response.prepare(request)
    await unless_stalled(request.transport, response.write_eof())
    return response


async def unless_stalled(transport: asyncio.Transport | None, write: Awaitable[None]) -> None:
    """Wait for a write, up to `STALLED` seconds, and then raise ConnectionAbortedError."""
    try:
        async with asyncio.timeout(STALLED):
            await write
    except TimeoutError:
        if transport is not None:
            transport.abort()  # closing would wait for the reader once more
        raise ConnectionAbortedError("the client does not read") from None


class EventStream:
    """An open stream of events. Every method raises ConnectionError once the client is gone."""

    def __init__(self, request: web.Request) -> None:
        self._transport = request.transport
        self._response = web.StreamResponse(headers=_HEADERS)

    @classmethod
    async def open(cls, request: web.Request) -> Self:
        """Send the headers, so that the client knows that its request was accepted."""
        stream = cls(request)
        await stream._response.prepare(request)
        return stream

    async def send(self, *data: str) -> None:
        """Send one event for each piece of data (without newlines), all in one write."""
        await self._write("".join(f"data: {piece}\n\n" for piece in data))

    async def send_named(self, *events: tuple[str, str]) -> None:
        """Send events of a type: pairs of its name and data (without newlines)."""
        await self._write("".join(f"event: {name}\ndata: {data}\n\n" for name, data in events))

    async def keep_alive(self) -> None:
        """Send a comment, which clients skip, so that no proxy takes silence for death."""
        await self._write(": keep-alive\n\n")

    async def close(self) -> web.StreamResponse:
        """End the body at once: clients read on until its end."""
        await unless_stalled(self._transport, self._response.write_eof())
        return self._response

    async def _write(self, events: str) -> None:
        await unless_stalled(self._transport, self._response.write(events.encode()))
