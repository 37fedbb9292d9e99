"""Refusals and limits of time, in the shape of each wire."""

import asyncio
import json

import aiohttp
import pytest

from ragcache.errors import EngineUnavailable, Overloaded, QueueTimeout, RequestTimeout
from ragcache.gateway import bodies, exchange

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5000}
BODIES = {CHAT: ASK, COMPLETIONS: {"model": "tiny", "prompt": "hi"}, MESSAGES: ASK}

every_wire = pytest.mark.parametrize("path", BODIES)


def error_of(path, body):
    """The error's type and message; the rest of the shape is checked."""
    if path == MESSAGES:
        assert body.keys() == {"type", "error", "request_id"}
        assert body["type"] == "error"
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["type"], body["error"]["message"]


@pytest.fixture
def post(http):
    async def post(path, **changes):
        async with http.post(path, json=BODIES[path] | changes) as response:
            return response.status, response.headers, await response.text()

    return post


@every_wire
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "retry", "openais", "anthropics"),
    [
        (Overloaded("full", retry_after=7), 429, "7", "rate_limit_error", "rate_limit_error"),
        (QueueTimeout("long"), 503, "5", "server_error", "overloaded_error"),
        (EngineUnavailable("dead"), 503, "5", "server_error", "overloaded_error"),
    ],
    ids=["full", "waited", "dead"],
)
async def test_a_refusal_says_when_to_come_again(
    post, serving, path, stream, refusal, status, retry, openais, anthropics
):
    serving.script.refuse = refusal
    got, headers, text = await post(path, stream=stream)
    assert (got, headers["Retry-After"]) == (status, retry)
    kind, message = error_of(path, json.loads(text))
    assert (kind, message) == (anthropics if path == MESSAGES else openais, refusal.message)


@every_wire
@pytest.mark.parametrize(
    ("failure", "status"), [(QueueTimeout("waited"), 503), (RequestTimeout("took"), 504)]
)
async def test_time_that_is_up_is_a_status_or_the_last_event(post, serving, path, failure, status):
    serving.script.fail_after, serving.script.failure = 2, failure
    got, headers, text = await post(path)
    assert got == status
    assert error_of(path, json.loads(text))[1] == failure.message
    assert ("Retry-After" in headers) == (status == 503)
    assert headers.get("x-should-retry") == (None if status == 503 else "false")
    got, _, text = await post(path, stream=True)
    assert got == 200
    *_, last, end = text.split("\n\n")
    assert end == ""
    assert error_of(path, json.loads(last.partition("data: ")[2]))[1] == failure.message
    assert all(generation.closed for generation in serving.generations)


async def test_clients_do_not_repeat_what_took_too_long(client, anthropic, serving):
    serving.script.fail_after, serving.script.failure = 1, RequestTimeout("took too long")
    for sdk, ask in (
        (client, client.with_options(max_retries=3).chat.completions.create),
        (anthropic, anthropic.with_options(max_retries=3).messages.create),
    ):
        before = len(serving.generations)
        with pytest.raises(Exception, match="took too long") as caught:
            await ask(**ASK)
        assert caught.value.status_code == 504, sdk
        assert len(serving.generations) == before + 1


async def test_timeouts_have_their_own_label(post, http, serving):
    for failure in (QueueTimeout("waited"), RequestTimeout("took")):
        serving.script.fail_after, serving.script.failure = 1, failure
        for stream in (False, True):
            await post(CHAT, stream=stream)
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    for kind, status in (("QueueTimeout", 503), ("RequestTimeout", 504)):
        labels = f'api="chat",error_type="{kind}",model_name="tiny"'
        assert f"ragcache_request_errors_total{{{labels}}} 2.0" in lines
        labels = f'api="chat",finish_reason="error",model_name="tiny",status="{status}"'
        assert f"ragcache_requests_total{{{labels}}} 2.0" in lines


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_reader_too_far_behind_loses_its_generation_at_once(
    url, serving, monkeypatch, path
):
    monkeypatch.setattr(exchange, "BEHIND", 50)
    serving.script.pieces = ("x" * 50_000,) * 5_000  # more than all buffers on the way
    serving.script.pause = 0.0005
    async with (
        aiohttp.ClientSession(url, read_bufsize=1024) as http,
        http.post(path, json=BODIES[path] | {"stream": True}) as response,
    ):
        async with asyncio.timeout(30):
            while not serving.generations or not serving.generations[0].closed:
                await asyncio.sleep(0.005)
        said = serving.generations[0].usage.completion_tokens
        assert said < 5_000
        text = (await response.content.read()).decode()
    assert "50 pieces of the answer behind" in text.split("\n\n")[-2]
    assert text.count("x" * 50_000) >= 50  # what was there is delivered before
    assert serving.generations[0].usage.completion_tokens == said


async def test_how_far_a_reader_may_be_behind_grows_with_the_choices(post, monkeypatch):
    monkeypatch.setattr(exchange, "BEHIND", 10)
    status, _, text = await post(CHAT, n=16, stream=True)  # each step of it has 16 pieces
    assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)


COUNTS = (f"{CHAT}/count_tokens", f"{MESSAGES}/count_tokens")


async def upload(url, path, size, key="none"):
    """Begin to send a body."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n"
    writer.write(f"{head}Content-Length: {size}\r\n\r\n{{".encode())
    return reader, writer


@pytest.mark.parametrize("path", [*BODIES, *COUNTS])
async def test_what_is_uploaded_at_once_is_bounded_in_all_and_for_each_tenant(start, path):
    url = await start(max_body_size=1000, api_keys=["key-a", "key-b", "key-c"])
    async with aiohttp.ClientSession(url) as http:

        async def status(key):
            body = BODIES.get(path, ASK)
            async with http.post(path, json=body, headers={"x-api-key": key}) as response:
                return response.status

        async def until_refused(key):
            async with asyncio.timeout(10):
                while await status(key) != 429:
                    await asyncio.sleep(0.01)

        assert await status("key-a") == 200
        writers = [(await upload(url, path, 1000, "key-a"))[1] for _ in range(2)]
        await until_refused("key-a")
        assert await status("key-b") == 200
        writers += [(await upload(url, path, 1000, "key-b"))[1] for _ in range(2)]
        await until_refused("key-c")
        for writer in writers:
            writer.close()
        async with asyncio.timeout(10):
            while await status("key-a") != 200:
                await asyncio.sleep(0.01)


@every_wire
async def test_a_body_that_does_not_arrive_in_time_is_a_408(url, path, monkeypatch):
    monkeypatch.setattr(bodies, "ARRIVES_WITHIN", 0.1)
    reader, writer = await upload(url, path, 100)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert head.startswith(b"HTTP/1.1 408 ")
    body = json.loads(await asyncio.wait_for(reader.read(1000), 10))
    assert error_of(path, body) == (
        "invalid_request_error",
        "the body did not arrive within 0.1 s",
    )
    writer.close()
