"""Callers get LangChain's exceptions; what may pass is tried again, unless an answer has begun."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelPermissionDeniedError,
    ModelRateLimitError,
    ModelTimeoutError,
)
from langchain_ragcache import ChatRagcache, calls

from ragcache.config import ServeSettings
from ragcache.embedded import EmbeddedGateway
from ragcache.gateway.app import listening

QUESTION = "What will I see?"
LONG = "word " * 9000


async def streamed(model, *call):
    return [chunk async for chunk in model.astream(*call)]


CALLS = {
    "invoke": lambda model: model.ainvoke(QUESTION),
    "stream": lambda model: streamed(model, QUESTION),
}
in_every_call = pytest.mark.parametrize("ask", CALLS.values(), ids=CALLS)


# The gateway's own, in both ways.


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 9}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"extra_body": {"top_k": "many"}}, "top_k"),
        ({"extra_body": {"stream_options": {"include_usage": 3}}}, "include_usage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_field_is_named(model, fields, named):
    with pytest.raises(ModelInvalidRequestError, match=named):
        await model.ainvoke(QUESTION, **fields)
    with pytest.raises(ModelInvalidRequestError, match=named):
        model.invoke(QUESTION, **fields)


async def test_a_prompt_beyond_the_context(model):
    with pytest.raises(ContextOverflowError, match="8192"):
        await model.ainvoke(LONG)
    with pytest.raises(ContextOverflowError, match="8192"):
        await streamed(model, LONG)


@in_every_call
async def test_a_model_that_is_not_served(model, ask):
    with pytest.raises(ModelNotFoundError, match="gpt-99"):
        await ask(model.bind(model="gpt-99"))


@in_every_call
async def test_an_answer_that_cannot_be_sampled_and_the_next(model, gateway, ask, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(gateway.model, "logits", lambda context: torch.full((49152,), np.nan))
        with pytest.raises(ModelAPIError):
            await ask(model)
    assert model.invoke(QUESTION).text == gateway.script.text


@pytest.fixture(scope="module")
def narrow(make_gateway):
    """Room for one request that runs and one that waits."""
    settings = ServeSettings(max_running=1, max_queue=1, max_batch_tokens=512)
    with make_gateway(settings=settings, max_model_len=1000) as gateway:
        gateway.script.free = True
        yield gateway


@pytest.fixture(params=["http", "embedded"])
def crowded(request, narrow):
    """A chat model before the gateway with little room."""
    if request.param == "http":
        return ChatRagcache(base_url=narrow.url, max_tokens=900)
    return ChatRagcache(engine=EmbeddedGateway(narrow.serving), max_tokens=900)


@pytest.fixture
def pauses(monkeypatch):
    """What a call would wait for before each retry; it waits no more than a moment."""
    seconds = []

    async def sleep(pause):
        seconds.append(pause)
        await asyncio.sleep(0.001)

    monkeypatch.setattr(calls, "asyncio", SimpleNamespace(sleep=sleep, timeout=asyncio.timeout))
    monkeypatch.setattr(calls, "random", SimpleNamespace(uniform=lambda low, high: low))
    return seconds


@pytest_asyncio.fixture(loop_scope="session")
async def occupants(crowded, narrow, monkeypatch):
    """Two calls that take all the room until they are cancelled."""
    logits = narrow.model.logits

    def slow(context):
        time.sleep(0.02)
        return logits(context)

    monkeypatch.setattr(narrow.model, "logits", slow)
    tasks = []
    for state in ("running", "waiting"):
        tasks.append(asyncio.create_task(crowded.ainvoke(f"{state}?")))
        while not getattr(narrow.serving.stats(), state):
            await asyncio.sleep(0.002)
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(narrow.at_rest)


@in_every_call
async def test_a_full_queue(crowded, occupants, ask, pauses):
    with pytest.raises(ModelRateLimitError):
        await ask(crowded.model_copy(update={"max_retries": 3}))
    assert pauses == [1, 1, 1]  # as the gateway says
    for task in occupants:
        task.cancel()
    assert await ask(crowded.model_copy(update={"max_retries": 1000, "max_tokens": 3}))


@pytest.mark.skipif(
    not hasattr(SummarizationMiddleware, "_overflow_retry_prompt"),
    reason="older releases of langchain do not try again with less",
)
async def test_a_summary_that_is_too_long_is_made_of_less(crowded):
    model = crowded.load().model_copy(update={"max_tokens": 20})
    summarize = SummarizationMiddleware(
        model, trigger=("messages", 3), keep=("messages", 1), trim_tokens_to_summarize=None
    )
    history = [("user", "word " * 500), ("ai", "word " * 500), ("user", QUESTION)]
    with pytest.raises(ContextOverflowError):
        await create_agent(model).ainvoke({"messages": history})
    agent = create_agent(model, middleware=[summarize])
    result = await agent.ainvoke({"messages": history})
    assert "summary" in result["messages"][0].text
    assert result["messages"][-1].usage_metadata["output_tokens"] == 20


@pytest.fixture(scope="module")
def guarded(make_gateway):
    with make_gateway(api_keys=["right"], max_body_size=10_000) as gateway:
        yield gateway


@in_every_call
async def test_keys_and_large_bodies(guarded, ask, monkeypatch):
    with pytest.raises(ModelAuthenticationError):
        await ask(ChatRagcache(base_url=guarded.url, api_key="wrong"))
    with pytest.raises(ModelAuthenticationError):
        await ask(ChatRagcache(base_url=guarded.url, model="tiny"))
    right = ChatRagcache(base_url=guarded.url, api_key="right")
    with pytest.raises(ModelInvalidRequestError, match="10000"):
        await ask(right.bind(user="x" * 10_000))
    assert await ask(right)
    monkeypatch.setenv("RAGCACHE_API_KEY", "right")
    assert await ask(ChatRagcache(base_url=guarded.url))


# What only a network can do.

HEAD = {"id": "chatcmpl-1", "model": "tiny", "usage": None}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def chunk(text=None, reason=None):
    delta = {} if text is None else {"content": text}
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


CHUNKS = [
    chunk("It is "),
    chunk("seen."),
    chunk(reason="stop"),
    {**HEAD, "choices": [], "usage": USAGE},
]
WHOLE = {
    **HEAD,
    "choices": [{"index": 0, "message": {"content": "It is seen."}, "finish_reason": "stop"}],
    "usage": USAGE,
}


def events(*items):
    return b"".join(b"data: %s\n\n" % json.dumps(item).encode() for item in items)


class Server:
    """Answers one request after the other as it is told; the last answer is for all that follow."""

    def __init__(self):
        self.answers = []
        self.bodies = []
        self.url = ""

    async def handle(self, request):
        self.bodies.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request, self.bodies[-1])

    def model(self, **options):
        return ChatRagcache(base_url=self.url, model="tiny", **options)


@pytest_asyncio.fixture(loop_scope="session")
async def server():
    made = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.handle)
    async with listening(app, "127.0.0.1", 0) as made.url:
        yield made


def status(code, text="", **headers):
    async def answer(request, body):
        return web.Response(status=code, text=text, headers=headers)

    return answer


def refusal(code, message, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return status(code, json.dumps({"error": {"message": message, "type": "x"}}), **headers)


async def good(request, body):
    if body.get("stream"):
        return await pieces(events(*CHUNKS) + b"data: [DONE]\n\n")(request, body)
    return web.json_response(WHOLE)


def pieces(*parts, lost=False):
    """A stream in these pieces; `lost` is the connection, at their end."""

    async def answer(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.001)
        if lost:
            request.transport.abort()
        return response

    return answer


@in_every_call
async def test_what_may_pass_is_tried_again(server, pauses, ask):
    server.answers = [
        refusal(429, "busy", Retry_After="3"),
        refusal(503, "starting", Retry_After="60"),
        status(502, "<html>Bad Gateway</html>"),
        status(502, "<html>Bad Gateway</html>"),
        good,
    ]
    assert await ask(server.model(max_retries=4))
    assert pauses == [3, 8, 2, 4]
    assert len(server.bodies) == 5
    assert all(body == server.bodies[0] for body in server.bodies)


@in_every_call
@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (refusal(429, "the queue is full"), ModelRateLimitError, "the queue is full"),
        (refusal(503, "loading"), ModelAPIError, "loading"),
        (status(502, "<html>\n<h1>Bad  Gateway"), ModelAPIError, "502 from .*<h1>Bad Gateway"),
        (status(504, ""), ModelTimeoutError, "504 from "),
        (status(408, ""), ModelTimeoutError, "408 from "),
        (status(200, "<html>Welcome</html>"), ModelConnectionError, "http"),
        (status(200, "[1, 2]"), ModelConnectionError, "http"),
        (pieces(lost=True), ModelConnectionError, "no answer from "),
    ],
    ids=["429", "503", "html", "504", "408", "no JSON", "no object", "lost"],
)
async def test_what_does_not_pass(server, pauses, ask, answer, kind, said):
    server.answers = [answer]
    with pytest.raises(kind, match=said):
        await ask(server.model(max_retries=2))
    assert len(server.bodies) == 3
    assert pauses == [0.5, 1]


@in_every_call
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(400, "temperature: too hot"), ModelInvalidRequestError),
        (refusal(403, "not yours"), ModelPermissionDeniedError),
        (status(404, '{"detail": "Not Found"}'), ModelNotFoundError),
        (refusal(422, "no"), ModelInvalidRequestError),
        (refusal(500, "broken"), ModelAPIError),
    ],
    ids=["400", "403", "404", "422", "500"],
)
async def test_what_will_not_pass_is_asked_once(server, ask, answer, kind):
    server.answers = [answer]
    with pytest.raises(kind):
        await ask(server.model())
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (pieces(events(CHUNKS[0]), lost=True), ModelConnectionError),
        (pieces(events(CHUNKS[0])), ModelConnectionError),
        (pieces(events(CHUNKS[0]), b"data: {oops\n\n"), ModelConnectionError),
        (
            pieces(events(CHUNKS[0], {"error": {"message": "gone", "type": "server_error"}})),
            ModelAPIError,
        ),
        (
            pieces(events(CHUNKS[0], {"error": {"message": "busy", "type": "rate_limit_error"}})),
            ModelRateLimitError,
        ),
    ],
    ids=["lost", "ended", "no JSON", "error", "limit"],
)
async def test_a_stream_that_breaks_is_not_begun_again(server, answer, kind):
    server.answers = [answer, good]
    stream = server.model().astream(QUESTION)
    assert (await anext(stream)).text == "It is "
    with pytest.raises(kind):
        await anext(stream)
    assert len(server.bodies) == 1


async def test_a_stream_may_come_in_any_pieces(server):
    wire = b": keep-alive\n\n" + events(*CHUNKS).replace(b"\n", b"\r\n") + b"data:[DONE]\r\n\r\n"
    server.answers = [pieces(*(wire[at : at + 1] for at in range(len(wire))))]
    chunks = await streamed(server.model(), QUESTION)
    assert [each.text for each in chunks if each.text] == ["It is ", "seen."]
    assert [each.usage_metadata["total_tokens"] for each in chunks if each.usage_metadata] == [5]


@in_every_call
async def test_nobody_answers(ask, pauses):
    with pytest.raises(ModelConnectionError, match=r"no answer from http://127\.0\.0\.1:9"):
        await ask(ChatRagcache(base_url="http://127.0.0.1:9", model="tiny", max_retries=1))
    assert pauses == [0.5]


@in_every_call
async def test_the_time_limit_is_for_all_tries_together(server, ask):
    server.answers = [refusal(503, "loading", Retry_After="5")]
    with pytest.raises(ModelTimeoutError, match=r"0\.2 seconds"):
        await ask(server.model(timeout=0.2, max_retries=5))
    assert len(server.bodies) == 1


async def test_a_connection_that_was_closed_meanwhile_is_opened_again(server):
    server.answers = [good, pieces(lost=True), good]
    model = server.model(max_retries=0)
    assert (await model.ainvoke(QUESTION)).text == "It is seen."
    with pytest.raises(ModelConnectionError):
        await model.ainvoke(QUESTION)
    assert (await model.ainvoke(QUESTION)).text == "It is seen."
