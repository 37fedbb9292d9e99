"""Whatever arrives: a 4xx in OpenAI's shape, and the next good request is answered."""

import asyncio
import io
import json

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from ragcache.errors import EngineUnavailable, GenerationFailed, InvalidRequest, Overloaded

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
GOOD = {"model": "tiny", "messages": [USER]}


def chat(**changes):
    return {**GOOD, **changes}


def message(**changes):
    return chat(messages=[{**USER, **changes}])


TEXT = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

BAD_CHAT = [
    (chat(messages=[]), "messages"),
    ({"model": "tiny"}, "messages"),
    ({"messages": [USER]}, "model"),
    (chat(model=5), "model"),
    (chat(messages="hi"), "messages"),
    (chat(messages=["hi"]), "messages[0]"),
    (chat(messages=[USER, {"content": "hi"}]), "messages[1].role"),
    (message(role="robot"), "messages[0].role"),
    (message(content=5), "messages[0].content"),
    (message(content=None), "messages[0].content"),
    (message(content=[TEXT, IMAGE]), "messages[0].content[1]"),
    (message(content=[AUDIO]), "messages[0].content[0]"),
    (message(content=[FILE]), "messages[0].content[0]"),
    (message(content=["hi"]), "messages[0].content[0]"),
    (message(content=[{"type": "text", "text": 5}]), "messages[0].content[0].text"),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(content=[{"text": "hi"}]), "messages[0].content[0].type"),
    (message(content=[{"type": "refusal", "refusal": "no"}]), "messages[0].content"),
    (message(role="assistant", content=None), "messages[0].content"),
    (message(role="assistant", tool_calls="f()"), "messages[0].tool_calls"),
    (message(role="tool"), "messages[0].tool_call_id"),
    (message(role="assistant", audio={"id": "a"}), "messages[0].audio"),
    (
        message(role="assistant", content=None, function_call={"name": "f"}),
        "messages[0].function_call",
    ),
    (message(tool_calls=[CALL]), "messages[0].tool_calls"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(modalities=["text", "audio"]), "modalities"),
    (chat(audio={"voice": "alloy", "format": "wav"}), "audio"),
    (chat(web_search_options={}), "web_search_options"),
    (chat(prediction={"type": "content", "content": "x"}), "prediction"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(temperature=float("nan")), "temperature"),
    (chat(temperature=float("inf")), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_p=1.1), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(min_p=2), "min_p"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(presence_penalty=-2.5), "presence_penalty"),
    (chat(frequency_penalty=2.5), "frequency_penalty"),
    (chat(logit_bias={"x": 1}), "logit_bias.x"),
    (chat(logit_bias={"5": 101}), "logit_bias.5"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(logprobs=3), "logprobs"),
    (chat(stop=[""]), "stop[0]"),
    (chat(stop=list("abcde")), "stop"),
    (chat(stop_token_ids=["a"]), "stop_token_ids[0]"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens="5"), "max_tokens"),
    (chat(max_tokens=1.5), "max_tokens"),
    (chat(max_completion_tokens=-1), "max_completion_tokens"),
    (chat(min_tokens=-1), "min_tokens"),
    (chat(n=0), "n"),
    (chat(n=0, stream=True), "n"),
    (chat(n=-1), "n"),
    (chat(n=1000), "n"),
    (chat(seed=2**64), "seed"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(cache_salt=""), "cache_salt"),
    (chat(chat_template_kwargs=[]), "chat_template_kwargs"),
]

BAD_COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": "x", "logprobs": 6}, "logprobs"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "echo": "yes"}, "echo"),
    ({"prompt": "x", "tools": [{}]}, "tools"),
    ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
    ({"prompt": ["x", "y"], "ragcache": {"explain": True}}, "ragcache.explain"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "best_of": 2}, "best_of"),
]

NOT_JSON = [
    b"",
    b"{",
    json.dumps(GOOD).encode()[:-5],
    b"[]",
    b"null",
    b'"hi"',
    b"5",
    b"\xff\xfe{\x00}\x00",
    b"[" * 10_000,
    b'{"model": "tiny", "messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"a": ' * 10_000,
    rb'{"model": "tiny", "messages": [{"role": "user", "content": "\ud83d"}]}',
]


@pytest.fixture
async def refused(http):
    """Post to a path; check the shape of the refusal, and that a good request still works."""

    async def refused(path, status=400, method="POST", **body):
        async with http.request(method, path, **body) as response:
            assert response.status == status
            error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        async with http.post(CHAT, json=GOOD) as response:
            answer = await response.json()
        assert answer["choices"][0]["message"]["content"] == "Hello, wörld 🌍!"
        return error

    return refused


@pytest.mark.parametrize(("body", "param"), BAD_CHAT)
async def test_a_bad_field_of_a_chat_is_named(refused, body, param):
    error = await refused(CHAT, json=body)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
async def test_a_bad_field_of_a_completion_is_named(refused, body, param):
    error = await refused("/v1/completions", json={"model": "tiny", **body})
    assert error["param"] == param


@pytest.mark.parametrize("body", NOT_JSON, ids=range(len(NOT_JSON)))
async def test_what_is_not_a_json_object_is_refused(refused, body):
    assert (await refused(CHAT, data=body))["param"] is None


@pytest.mark.parametrize("charset", ["utf-16", "klingon"])
async def test_json_is_utf8_whatever_the_charset_says(http, charset):
    headers = {"Content-Type": f"application/json; charset={charset}"}
    async with http.post(CHAT, data=json.dumps(GOOD).encode(), headers=headers) as response:
        assert response.status == 200


async def test_a_compressed_body_is_refused(refused):
    await refused(CHAT, 415, data=b"not gzip", headers={"Content-Encoding": "gzip"})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat(temperature=1e-9), 1e-9),
        (chat(temperature=0), 0),
        (chat(max_tokens=10**12), 1.0),
        (message(content=""), 1.0),
        (message(content="\0"), 1.0),
        (message(content="x" * 10_000), 1.0),
        (message(content=[]), 1.0),
        (chat(messages=[USER] * 400), 1.0),
        (chat(tools=[], tool_choice="none", response_format={"type": "text"}), 1.0),
    ],
)
async def test_odd_but_valid_requests_are_served(http, serving, body, expected):
    async with http.post(CHAT, json=body) as response:
        assert response.status == 200
    assert serving.generations[0].request.sampling.temperature == expected


async def test_integers_may_be_written_as_floats(http, serving):
    body = json.dumps(GOOD)[:-1] + ', "max_tokens": 1e12, "n": 2.0}'
    async with http.post(CHAT, data=body.encode()) as response:
        assert response.status == 200
    sampling = serving.generations[0].request.sampling
    assert (sampling.max_tokens, sampling.n) == (10**12, 2)


async def test_unknown_routes_and_methods_answer_in_shape(refused, http):
    await refused("/v1/responses", 404, json={})
    await refused("/", 404, method="GET")
    await refused(CHAT, 405, method="GET")
    async with http.get(CHAT) as response:
        assert response.headers["Allow"] == "POST"


async def test_an_unknown_model_is_404(refused):
    error = await refused(CHAT, 404, json=chat(model="gpt-99"))
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_a_body_beyond_the_limit_is_413(start):
    url = await start(max_body_size=10_000)
    body = json.dumps(message(content="x" * 10_000)).encode()

    async def trickle():
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    async with aiohttp.ClientSession(url) as http:
        for data in (body, trickle()):  # announced in Content-Length, and chunked
            async with http.post(CHAT, data=data) as response:
                assert response.status == 413
                assert "10000" in (await response.json())["error"]["message"]
        async with http.post(CHAT, json=GOOD) as response:
            assert response.status == 200


async def test_a_body_of_megabytes_is_parsed_like_a_small_one(http, serving):
    async def post(body):
        data = io.BytesIO(json.dumps(body).encode())
        async with http.post(CHAT, data=data) as response:
            return await response.json()

    answer = await post(message(content="words " * 500_000))
    assert answer["error"]["code"] == "context_length_exceeded"
    answer = await post(message(content="x" * 3_000_000))
    assert answer["choices"][0]["finish_reason"] == "stop"
    answer = await post(chat(n=0, user="x" * 3_000_000))
    assert answer["error"]["param"] == "n"


async def test_the_clients_typed_errors_are_raised(client, serving):
    async def ask(**changes):
        await client.chat.completions.create(**{**GOOD, **changes})

    with pytest.raises(openai.BadRequestError) as caught:
        await ask(temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(messages=[{"role": "user", "content": "x " * 1000}])
    assert caught.value.code == "context_length_exceeded"
    assert "prompt is too long" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        await ask(model="gpt-99")
    serving.script.refuse = Overloaded("the queue is full")
    with pytest.raises(openai.RateLimitError) as caught:
        await ask()
    assert caught.value.response.headers["Retry-After"] == "1"
    serving.script.refuse = EngineUnavailable("the engine died")
    with pytest.raises(openai.InternalServerError) as caught:
        await ask()
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"] == "5"


async def test_a_wrong_key_and_a_large_body_have_their_types_too(start):
    url = await start(api_keys=["right"], max_body_size=10_000)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as unauthorized:
            await client.chat.completions.create(**GOOD)
        right = client.with_options(api_key="right")
        with pytest.raises(openai.APIStatusError) as too_large:
            await right.chat.completions.create(**message(content="x" * 10_000))
        assert (await right.chat.completions.create(**GOOD)).choices
    assert unauthorized.value.code == "invalid_api_key"
    assert too_large.value.status_code == 413


async def test_the_synchronous_client_raises_them_as_well(url, serving):
    serving.script.refuse = Overloaded("the queue is full")

    def ask(**changes):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            client.chat.completions.create(**{**GOOD, **changes})

    with pytest.raises(openai.RateLimitError):
        await asyncio.to_thread(ask)
    with pytest.raises(openai.BadRequestError) as caught:
        await asyncio.to_thread(ask, tool_choice="required")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("refusal", [Overloaded, EngineUnavailable, GenerationFailed])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_retries_is_answered_the_second_time(
    client, serving, monkeypatch, refusal, stream
):
    monkeypatch.setattr(refusal, "retry_after", 1 if refusal.retry_after else None)
    serving.script.refuse = refusal("not now")
    start, attempts = serving.start, []

    async def once(request):
        attempts.append(request)
        try:
            return await start(request)
        finally:
            serving.script.refuse = None

    monkeypatch.setattr(serving, "start", once)
    patient = client.with_options(max_retries=1)
    assert await patient.chat.completions.create(**GOOD, stream=stream)
    assert len(attempts) == 2


async def test_a_bug_is_500_without_details_and_logged_with_them(client, serving, errors_logged):
    serving.script.refuse = KeyError("secret detail")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(**GOOD, extra_headers={"x-request-id": "trace-9"})
    assert caught.value.status_code == 500
    assert "secret" not in caught.value.message
    assert "trace-9" in caught.value.message
    assert errors_logged() == ["request trace-9 failed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_does_not_compile_is_a_400(client, serving, stream):
    message = "response_format: unknown type 'strin'"
    serving.script.refuse = InvalidRequest(message, param="response_format")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            **GOOD, stream=stream, response_format={"type": "json_object"}
        )
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_stream_is_a_status(client, serving, stream):
    serving.script.refuse = EngineUnavailable("the engine died")
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(**GOOD, stream=stream)


async def test_a_failure_in_the_stream_is_an_event_and_no_end(http, client, serving):
    serving.script.fail_after = 3
    serving.script.failure = EngineUnavailable("the engine died")
    async with http.post(CHAT, json=chat(stream=True)) as response:
        assert response.status == 200
        wire = await asyncio.wait_for(response.text(), 2)
    events = [json.loads(line.removeprefix("data: ")) for line in wire.split("\n\n") if line]
    assert events[-1]["error"]["code"] == "engine_unavailable"
    assert "".join(e["choices"][0]["delta"]["content"] for e in events[:-1]) == "Hello, wörld"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert serving.generations[0].closed
    with pytest.raises(openai.APIError, match="engine died"):
        async for _ in await client.chat.completions.create(**GOOD, stream=True):
            pass


async def test_a_bug_in_the_stream_shows_no_details(http, serving, errors_logged):
    serving.script.fail_after = 1
    async with http.post(CHAT, json=chat(stream=True)) as response:
        wire = await response.text()
    assert "internal error" in wire
    assert "broken" not in wire
    assert len(errors_logged()) == 1


async def test_a_failure_of_a_whole_answer_is_a_status(client, serving):
    serving.script.fail_after = 3
    serving.script.failure = EngineUnavailable("the engine died")
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(**GOOD)
