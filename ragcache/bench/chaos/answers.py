"""What came back, whichever wire and whether in a stream or whole."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from ragcache.bench.chaos.requests import Json, Wire

_DONE = "[DONE]"


class Broken(Exception):
    """An answer that is not as it must be."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Text and reason of each choice, and the number of output tokens."""

    choices: tuple[tuple[str, str], ...]
    output_tokens: int


async def read_answer(response: aiohttp.ClientResponse, wire: Wire) -> Answer:
    """Read all of a 200; raises Broken where it ends in an error, or has no end."""
    if response.content_type != "text/event-stream":
        body = await response.json()
        return _whole_chat(body) if wire == "chat" else _whole_message(body)
    events = _events(response)
    return await (_streamed_chat(events) if wire == "chat" else _streamed_message(events))


def _whole_chat(body: Json) -> Answer:
    choices = (
        (choice["message"]["content"] or "", choice["finish_reason"]) for choice in body["choices"]
    )
    return Answer(tuple(choices), body["usage"]["completion_tokens"])


def _whole_message(body: Json) -> Answer:
    text = "".join(block["text"] for block in body["content"])
    return Answer(((text, body["stop_reason"]),), body["usage"]["output_tokens"])


async def _streamed_chat(events: AsyncIterator[Any]) -> Answer:
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    output_tokens = None
    async for event in _to_the_end(events, lambda event: event == _DONE):
        if "error" in event:
            raise Broken(f"an error in a stream: {event['error']}")
        for choice in event["choices"]:
            if choice["index"] in reasons:
                raise Broken(f"more behind the end of a choice: {choice}")
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
        output_tokens = (event.get("usage") or {}).get("completion_tokens", output_tokens)
    if output_tokens is None or reasons.keys() != texts.keys():
        raise Broken("a stream without an end of each choice")
    return Answer(tuple((texts[i], reasons[i]) for i in sorted(texts)), output_tokens)


async def _streamed_message(events: AsyncIterator[Any]) -> Answer:
    text, end = "", None
    async for event in _to_the_end(events, lambda event: event["type"] == "message_stop"):
        if event["type"] == "error":
            raise Broken(f"an error in a stream: {event['error']}")
        if end is not None:
            raise Broken(f"more behind the end of a message: {event}")
        if event["type"] == "content_block_delta":
            text += event["delta"]["text"]
        elif event["type"] == "message_delta":
            end = event
    if end is None:
        raise Broken("a stream without an end of its message")
    return Answer(((text, end["delta"]["stop_reason"]),), end["usage"]["output_tokens"])


async def _to_the_end(
    events: AsyncIterator[Any], is_end: Callable[[Any], bool]
) -> AsyncIterator[Any]:
    """All events but the one that ends the stream, which must come once, and last."""
    ended = False
    async for event in events:
        if ended:
            raise Broken(f"more behind the end of a stream: {event}")
        ended = is_end(event)
        if not ended:
            yield event
    if not ended:
        raise Broken("a stream without an end")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip().decode()
            yield data if data == _DONE else json.loads(data)
