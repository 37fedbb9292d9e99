"""One streaming chat request against any OpenAI-compatible server, with its timings."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pydantic import SecretStr

from ragcache.errors import RagcacheError

ChatMessages = Sequence[Mapping[str, str]]


class RequestFailed(RagcacheError):
    """The server refused a request, or broke off its answer; the message has its own words."""


@dataclass(slots=True)
class Reply:
    """One answer: times in seconds on the `time.perf_counter` clock, counts in tokens."""

    sent_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        if self.completion_tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.completion_tokens - 1)

    def take(self, event: Mapping[str, Any]) -> None:
        """Fold one stream event in; raises RequestFailed if it reports an error."""
        if error := event.get("error"):
            raise RequestFailed(f"the stream broke off with an error: {json.dumps(error)}")
        if usage := event.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0
        for choice in event.get("choices", ()):
            self._take_choice(choice)

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        text = choice.get("delta", {}).get("content") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text or self.finish_reason:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
            self.text += text


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Sends chat requests to `url` (ending in /v1), greedy and with usage in the stream."""

    http: aiohttp.ClientSession
    url: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    async def ask(self, messages: ChatMessages, max_tokens: int, salt: str | None = None) -> Reply:
        """Send one request and read its whole answer.

        A `salt` goes out as `cache_salt`: only requests of the same salt share a cache. Raises
        RequestFailed with the status and the body of a refusal.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
            **({} if salt is None else {"cache_salt": salt}),
        }
        reply = Reply(sent_at=time.perf_counter())
        try:
            async with self.http.post(f"{self.url}/chat/completions", json=body) as response:
                await _require_ok(response)
                async for event in _events(response):
                    reply.take(event)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailed(f"{self.url}: {error or 'timed out'}") from error
        if reply.finish_reason is None or not reply.prompt_tokens:
            raise RequestFailed("the stream ended without a finish reason, or without usage")
        return reply


async def first_model(http: aiohttp.ClientSession, url: str) -> str:
    """Name of the first model that the server lists; raises RequestFailed."""
    try:
        async with http.get(f"{url}/models") as response:
            await _require_ok(response)
            models = (await response.json())["data"]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestFailed(f"{url}: {error or 'timed out'}") from error
    if not models:
        raise RequestFailed(f"{url}/models lists no model")
    return str(models[0]["id"])


def bearer(key: SecretStr | None) -> dict[str, str]:
    """The headers that bring an API key."""
    return {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}


async def _require_ok(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        body = (await response.text())[:1000]
        raise RequestFailed(f"{response.method} {response.url}: HTTP {response.status}: {body}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a server-sent event stream.

    Reads to the end, beyond [DONE], so that the connection can be used again; not every server
    sends it.
    """
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)
