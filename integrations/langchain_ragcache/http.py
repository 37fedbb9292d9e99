"""A gateway at a URL."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from langchain_ragcache.failures import Refused, Unreachable

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
_SILENCE = 60.0  # seconds, after which a stream is lost: the gateway sends comments meanwhile
_STATUS_OF_TYPE = {"server_error": 500, "rate_limit_error": 429, "authentication_error": 401}


class Site:
    """`ragcache serve` at `base_url`, which may end in /v1, and the connections to it.

    Belongs to one event loop. Callers with different keys share the connections, and nothing else.
    """

    def __init__(self, base_url: str) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.proxy = _proxy(self.url)
        self._opened: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """Opened on the loop that uses it."""
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the server's queue decides
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._opened

    async def close(self) -> None:
        """Close all connections."""
        if self._opened is not None:
            await self._opened.close()


class HttpGateway:
    """Speaks to a site, with headers of its own.

    Every request raises `Refused` for an error and `Unreachable` where no answer comes back.
    """

    def __init__(self, site: Site, headers: Mapping[str, str]) -> None:
        self._site = site
        self._headers = headers

    async def models(self) -> list[Json]:
        """What is served, the canonical name first."""
        async with self._answer("GET", "/v1/models") as response:
            listed = (await _json(response)).get("data") or []
            return [entry for entry in listed if isinstance(entry, dict) and "id" in entry]

    async def complete(self, body: Json) -> Json:
        """The whole answer to a chat completion."""
        async with self._answer("POST", CHAT, body) as response:
            return await _json(response)

    async def stream(self, body: Json) -> AsyncGenerator[Json]:
        """The chunks of the answer; closing the iterator closes the connection."""
        streamed = {**body, "stream": True}
        async with self._answer("POST", CHAT, streamed, silence=_SILENCE) as response:
            async for data in _events(response.content):
                if data == b"[DONE]":
                    return
                chunk = _object(data, self._site.url)
                if "error" in chunk:
                    raise _stream_error(chunk["error"])
                yield chunk
        raise Unreachable(f"{self._site.url} ended the stream before the answer was complete")

    async def count_tokens(self, body: Json) -> int:
        """The prompt tokens of a chat completion."""
        async with self._answer("POST", f"{CHAT}/count_tokens", body) as response:
            return int((await _json(response))["prompt_tokens"])

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Json | None = None, silence: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        request = self._site.session.request(
            method,
            self._site.url + path,
            json=body,
            headers=self._headers,
            proxy=self._site.proxy,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silence),
        )
        try:
            async with request as response:
                if response.status >= 400:
                    raise await _error(response)
                yield response
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"no answer from {self._site.url}: {reason}") from error


def _proxy(url: str) -> str | None:
    """The proxy that the environment names, looked up once: aiohttp does so for each request."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


async def _json(response: aiohttp.ClientResponse) -> Json:
    return _object(await response.read(), str(response.url))


def _object(text: bytes, url: str) -> Json:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise Unreachable(f"{url} answered with something that is no JSON object") from error


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events; comments keep the connection alive and say nothing."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _error(response: aiohttp.ClientResponse) -> Refused:
    text = await response.text(errors="replace")
    retry_after = response.headers.get("Retry-After", "")
    seconds = float(retry_after) if retry_after.isdecimal() else None
    try:
        return _refused(response.status, json.loads(text), seconds)
    except (ValueError, LookupError, TypeError):  # a proxy's own page
        said = " ".join(text.split())[:200]
        return Refused(response.status, f"{response.status} from {response.url}: {said}")


def _refused(status: int, body: Json, retry_after: float | None = None) -> Refused:
    error = body["error"]
    return Refused(status, str(error["message"]), error.get("code"), retry_after)


def _stream_error(error: Any) -> Refused:
    """Of an event: the status is gone by then."""
    if not isinstance(error, dict):
        return Refused(500, str(error))
    status = _STATUS_OF_TYPE.get(error.get("type", ""), 400)
    return Refused(status, str(error.get("message")), error.get("code"))
