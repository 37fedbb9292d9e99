"""OpenAI's completion routes, from the request body to the last byte."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from aiohttp import web

from ragcache.gateway.backend import BACKEND
from ragcache.gateway.bodies import INTAKE, body_size, off_loop, read_body
from ragcache.gateway.exchange import Exchange, exchange
from ragcache.gateway.explanations import extension
from ragcache.gateway.failures import Failure
from ragcache.gateway.meter import METER
from ragcache.gateway.middleware import REQUEST_ID
from ragcache.gateway.openai.fields import CompletionFields
from ragcache.gateway.openai.format import ChatReply, Choice, Reply, TextReply
from ragcache.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from ragcache.gateway.record import RECORD
from ragcache.gateway.sse import KEEP_ALIVE, EventStream, send_whole
from ragcache.gateway.tenants import TENANT

_dumps = json.JSONEncoder(separators=(",", ":")).encode


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _answer(request, ChatCompletionRequest, ChatReply)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _answer(request, CompletionRequest, TextReply)


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/count_tokens: what the prompt of such a body comes to."""
    with request.app[INTAKE].room(request):
        body = await read_body(request, ChatCompletionRequest)
        serving = request.app[BACKEND].serving_model(body.model)
        (prompt,) = await off_loop(await body_size(request), body.prompts)
    return web.json_response({"prompt_tokens": await serving.count_tokens(prompt, request[TENANT])})


async def _answer(
    request: web.Request, schema: type[CompletionFields], reply_type: type[Reply]
) -> web.StreamResponse:
    with request.app[INTAKE].room(request):
        body = await read_body(request, schema)
        serving = request.app[BACKEND].serving_model(body.model)
        request[RECORD].model = body.model
        reply = reply_type(body.model, include_usage=body.include_usage)
        requests = await off_loop(
            await body_size(request), partial(body.requests, reply.id, request[TENANT])
        )
    async with exchange(serving, requests, request[METER]) as deltas:
        if body.ragcache.explain:
            block_size = serving.stats().block_size
            reply.extension = lambda: extension(deltas.explanations[0], block_size)
        if body.stream:
            return await _stream(request, deltas, reply)
        answer = await _whole(deltas, reply)
    return await send_whole(request, web.json_response(answer, dumps=_dumps))


async def _whole(deltas: Exchange, reply: Reply) -> dict[str, Any]:
    choices = [Choice(index) for index in range(deltas.choices)]
    async for batch in deltas.batches():
        for delta in batch:
            choices[delta.index].add(delta)
    return reply.body(choices, deltas.usage)


async def _stream(request: web.Request, deltas: Exchange, reply: Reply) -> web.StreamResponse:
    stream = await EventStream.open(request)
    try:
        await _send_deltas(stream, deltas, reply)
    except ConnectionError:
        raise
    except Exception as error:  # the status is sent: what is left is an event, and no [DONE]
        request[METER].failed(error)
        await stream.send(_dumps(Failure.of(error, request[REQUEST_ID]).openai()))
    return await stream.close()


async def _send_deltas(stream: EventStream, deltas: Exchange, reply: Reply) -> None:
    async for batch in deltas.batches(KEEP_ALIVE):
        if batch:
            await stream.send(*[_dumps(chunk) for delta in batch for chunk in reply.chunks(delta)])
        else:
            await stream.keep_alive()
    await stream.send(*map(_dumps, reply.closing(deltas.usage)), "[DONE]")
