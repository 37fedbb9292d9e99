"""Clients that leave, over raw sockets, against the runner that users get."""

import asyncio
import json
import random
import socket
import struct

import pytest
from yarl import URL

from ragcache.gateway import sse

WAIT = 5.0  # seconds; generous, for a busy machine


def request_bytes(stream):
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connect(url, **options):
    return await asyncio.open_connection(URL(url).host, URL(url).port, **options)


def reset(writer):
    """Close with RST instead of FIN."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def until(condition):
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("leave", [lambda writer: writer.close(), reset], ids=["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("state", ["queued", "running"])
async def test_a_client_that_leaves_aborts_its_generation(
    url, serving, errors_logged, stream, state, leave
):
    serving.script.pieces = ("word ",) * 10_000
    serving.script.pause = 0.005
    if state == "queued":
        serving.script.queued = asyncio.Event()
    reader, writer = await connect(url)
    writer.write(request_bytes(stream))
    await until(lambda: serving.generations)
    generation = serving.generations[0]
    if state == "running":
        await until(lambda: generation.usage.completion_tokens > 3)
    if stream:
        await reader.readuntil(b"\r\n\r\n")
    leave(writer)
    await until(lambda: generation.closed)
    said = generation.usage.completion_tokens
    await asyncio.sleep(0.05)
    assert generation.usage.completion_tokens == said
    assert not generation.ended
    assert not errors_logged()


async def test_a_normal_end_is_no_abort(client, http, serving):
    for stream in (False, True):
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        async with http.post("/v1/chat/completions", json={**ask, "stream": stream}) as response:
            await response.read()
    assert [generation.ended for generation in serving.generations] == [True, True]
    async with http.get("/metrics") as response:
        assert 'finish_reason="abort"' not in await response.text()


async def test_headers_come_while_the_request_is_queued(url, serving):
    serving.script.queued = asyncio.Event()
    reader, writer = await connect(url)
    writer.write(request_bytes(stream=True))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT)
    assert head.startswith(b"HTTP/1.1 200")
    writer.close()
    await until(lambda: serving.generations[0].closed)


async def test_comments_keep_a_silent_stream_alive(client, url, serving, monkeypatch):
    monkeypatch.setattr("ragcache.gateway.openai.routes.KEEP_ALIVE", 0.01)
    serving.script.queued = asyncio.Event()
    reader, writer = await connect(url)
    writer.write(request_bytes(stream=True))
    for _ in range(3):
        await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), WAIT)
    writer.close()
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    asyncio.get_running_loop().call_later(0.1, serving.script.queued.set)
    text = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(text) == "Hello, wörld 🌍!"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_reader_that_stalls_is_cut_off_and_nobody_else(
    client, http, url, serving, monkeypatch, errors_logged, stream
):
    async def aborted():
        async with http.get("/metrics") as response:
            return 'finish_reason="abort"' in await response.text()

    monkeypatch.setattr(sse, "STALLED", 0.2)
    serving.script.pieces = ("x" * 10_000,) * 2_000  # more than all buffers on the way
    _, writer = await connect(url, limit=1024)
    writer.transport.pause_reading()
    writer.write(request_bytes(stream))
    await until(lambda: serving.generations)
    serving.script = type(serving.script)()
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.choices[0].message.content == "Hello, wörld 🌍!"
    await until(lambda: serving.generations[0].closed)
    async with asyncio.timeout(WAIT):
        while not await aborted():
            await asyncio.sleep(0.01)
    writer.transport.abort()
    assert not errors_logged()


async def test_an_upload_that_breaks_off_is_no_error(url, client, errors_logged):
    _, writer = await connect(url)
    writer.write(request_bytes(stream=False)[:-20])
    await writer.drain()
    await asyncio.sleep(0.05)
    reset(writer)
    await client.models.list()
    assert not errors_logged()


async def test_fifty_clients_leaving_at_random_leave_no_trace(
    url, serving, http, client, errors_logged
):
    serving.script.pieces = ("word ",) * 1000
    serving.script.pause = 0.002
    dice = random.Random(7)
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    async def visit():
        _, writer = await connect(url)
        request = request_bytes(stream=dice.random() < 0.5)
        cut = dice.random() < 0.2
        writer.write(request[: dice.randrange(len(request))] if cut else request)
        await asyncio.sleep(dice.random() * 0.2)
        dice.choice([reset, lambda writer: writer.close()])(writer)

    await asyncio.gather(*[visit() for _ in range(50)])
    await until(lambda: all(generation.closed for generation in serving.generations))
    assert serving.generations
    assert not errors_logged()
    assert not unhandled
    await client.models.list()
