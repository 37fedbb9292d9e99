"""What a router reads in a request."""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic_core import from_json

from ragcache.cluster.request import RouteRequest
from ragcache.errors import RequestError
from ragcache.gateway.anthropic.schema import MessagesRequest
from ragcache.gateway.bodies import off_loop, parse
from ragcache.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from ragcache.types import ChatPrompt

# From a prompt and what may share encodings to the tokens that a replica will find.
# Raises RequestError.
Encode = Callable[[ChatPrompt | str, str], Awaitable[Sequence[int]]]

PATIENCE = 0.5  # seconds for a prompt; where it goes then is up to its conversation
LARGEST = 4 * 2**20  # bytes of a body; a prompt beyond is not worth the time

SESSION_HEADER = "x-session-id"

_OPENING = 1024  # characters of a text by which it is known
_SCHEMAS: Mapping[str, type[ChatCompletionRequest | CompletionRequest | MessagesRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
}
_Prompt = ChatPrompt | str | Sequence[int]


async def read_request(
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    tenant: str,
    encode: Encode | None,
) -> RouteRequest:
    """Find what the choice of a replica depends on.

    A body that cannot be understood is for a replica to refuse; nothing is known of it then. There
    are no tokens without `encode`, of what it refuses, and of what takes it too long.
    """
    if path not in _SCHEMAS:
        return RouteRequest()
    try:
        known = await off_loop(len(body), partial(_known, headers, body, tenant))
    except (ValueError, RecursionError):
        return RouteRequest()
    if encode is None or len(body) > LARGEST:
        return known
    try:
        async with asyncio.timeout(PATIENCE):
            salt, prompts = await off_loop(len(body), partial(_prompts, path, body))
            tokens = [await _tokens(encode, prompt, f"{tenant} {salt}") for prompt in prompts]
    except (RequestError, ValueError, OverflowError, RecursionError, TimeoutError):
        return known
    return replace(known, salt=salt, prompts=tuple(tokens))


def _known(headers: Mapping[str, str], body: bytes, tenant: str) -> RouteRequest:
    """Model and conversation."""
    fields = from_json(body)
    if not isinstance(fields, dict):
        raise ValueError("a body is an object")
    model = fields.get("model")
    session = headers.get(SESSION_HEADER) or _session(fields)
    digest = hashlib.sha256(json.dumps([tenant, session]).encode()).hexdigest()
    return RouteRequest(digest, tenant=tenant, model=model if isinstance(model, str) else None)


def _session(fields: Mapping[str, Any]) -> Any:
    """What the client names it by, or else how it begins, which is the same in all its turns."""
    metadata = fields.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    named = fields.get("prompt_cache_key") or user_id or fields.get("user")
    return named if isinstance(named, str) else _opening(fields)


def _opening(fields: Mapping[str, Any]) -> Any:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return json.dumps(fields.get("prompt"))[:_OPENING]
    roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
    first = roles.index("user") if "user" in roles else 0
    return [fields.get("system"), messages[: first + 1]]


def _prompts(path: str, body: bytes) -> tuple[str | None, list[_Prompt]]:
    """Salt and prompts. Raises InvalidRequest, and OverflowError for ids beyond int32."""
    request: ChatCompletionRequest | CompletionRequest | MessagesRequest
    request = parse(_SCHEMAS[path], body)
    if isinstance(request, MessagesRequest):
        return request.cache_salt, [request.prompt()]
    if isinstance(request, CompletionRequest) and request.echo:
        return request.cache_salt, []  # with log-probabilities, the cache is not read
    prompts = request.prompts()
    return request.cache_salt, [
        array("i", each) if isinstance(each, tuple) else each for each in prompts
    ]


async def _tokens(encode: Encode, prompt: _Prompt, scope: str) -> Sequence[int]:
    return await encode(prompt, scope) if isinstance(prompt, ChatPrompt | str) else prompt
