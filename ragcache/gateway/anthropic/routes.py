"""Anthropic's message routes, from the request body to the last byte."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from aiohttp import web

from ragcache.gateway.anthropic.format import BlockEvents, MessageReply, ending, usage_body
from ragcache.gateway.anthropic.schema import MessagesRequest, PromptFields
from ragcache.gateway.backend import BACKEND
from ragcache.gateway.bodies import INTAKE, body_size, off_loop, read_body
from ragcache.gateway.exchange import Exchange, exchange
from ragcache.gateway.failures import Failure
from ragcache.gateway.meter import METER
from ragcache.gateway.middleware import REQUEST_ID
from ragcache.gateway.record import RECORD
from ragcache.gateway.sse import KEEP_ALIVE, EventStream, send_whole
from ragcache.gateway.tenants import TENANT
from ragcache.types import Delta

_PING = {"type": "ping"}

_dumps = json.JSONEncoder(separators=(",", ":")).encode


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    with request.app[INTAKE].room(request):
        body = await read_body(request, MessagesRequest)
        serving = request.app[BACKEND].serving_model(body.model)
        request[RECORD].model = body.model
        reply = MessageReply(body, serving.stats().block_size)
        generation = await off_loop(
            await body_size(request), partial(body.request, reply.id, request[TENANT])
        )
    async with exchange(serving, [generation], request[METER]) as deltas:
        if body.stream:
            return await _stream(request, deltas, reply)
        answer = await _whole(deltas, reply)
    return await send_whole(request, web.json_response(answer, dumps=_dumps))


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens."""
    with request.app[INTAKE].room(request):
        body = await read_body(request, PromptFields)
        serving = request.app[BACKEND].serving_model(body.model)
        prompt = await off_loop(await body_size(request), body.prompt)
    return web.json_response({"input_tokens": await serving.count_tokens(prompt, request[TENANT])})


async def _whole(deltas: Exchange, reply: MessageReply) -> dict[str, Any]:
    collected = [delta async for batch in deltas.batches() for delta in batch]
    return reply.message(deltas.usage, deltas.explanations[0], collected)


async def _stream(
    request: web.Request, deltas: Exchange, reply: MessageReply
) -> web.StreamResponse:
    stream = await EventStream.open(request)
    try:
        await _send_message(stream, deltas, reply)
    except ConnectionError:
        raise
    except Exception as error:  # the status is sent: what is left is an event
        request[METER].failed(error)
        request_id = request[REQUEST_ID]
        await _send(stream, Failure.of(error, request_id).anthropic(request_id))
    return await stream.close()


async def _send_message(stream: EventStream, deltas: Exchange, reply: MessageReply) -> None:
    """Send all events of a message; the usage of the first already has the cache's share."""
    while not await deltas.admitted(KEEP_ALIVE):
        await _send(stream, _PING)
    start = reply.message(deltas.usage, deltas.explanations[0])
    await _send(stream, {"type": "message_start", "message": start}, _PING)
    blocks, last = BlockEvents(), Delta(0)
    async for batch in deltas.batches(KEEP_ALIVE):
        if not batch:
            await _send(stream, _PING)
            continue
        await _send(stream, *[event for delta in batch for event in blocks.of(delta)])
        last = batch[-1]
    usage = usage_body(deltas.usage)
    end = {"type": "message_delta", "delta": ending(last), "usage": usage}
    await _send(stream, end, {"type": "message_stop"})


async def _send(stream: EventStream, *events: dict[str, Any]) -> None:
    await stream.send_named(*[(event["type"], _dumps(event)) for event in events])
