"""Whatever arrives on /v1/messages: an error in Anthropic's shape, and never a 5xx."""

import asyncio
import json

import aiohttp
import pytest
from anthropic import (
    APIStatusError,
    AsyncAnthropic,
    AuthenticationError,
    BadRequestError,
    ContentTooLargeError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)
from anthropic.types import ErrorResponse

from ragcache.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
)
from ragcache.gateway.anthropic.schema import PromptFields
from ragcache.gateway.bodies import parse
from ragcache.gateway.failures import Failure

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
GOOD = {"model": "tiny", "max_tokens": 9, "messages": [USER]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}


def ask(**changes):
    return {**GOOD, **changes}


def blocks(*content, role="user"):
    return ask(messages=[USER, {"role": role, "content": list(content)}, USER])


def document(**source):
    return blocks({"type": "document", "source": source})


def result(**fields):
    call = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
    }
    block = {"type": "tool_result", "tool_use_id": "c", **fields}
    return ask(messages=[USER, call, {"role": "user", "content": [block]}])


def choice(**fields):
    return ask(tools=[TOOL], tool_choice=fields)


HERE = "messages[1].content[0]"

BAD = [
    ({"model": "tiny", "max_tokens": 9}, "messages"),
    ({"messages": [USER], "max_tokens": 9}, "model"),
    (ask(model=5), "model"),
    (ask(messages=[]), "messages"),
    (ask(messages="hi"), "messages"),
    (ask(messages=["hi"]), "messages[0]"),
    (ask(messages=[{"content": "hi"}]), "messages[0].role"),
    (ask(messages=[{"role": "tool", "content": "hi"}]), "messages[0].role"),
    (ask(messages=[{"role": ["user"], "content": "hi"}]), "messages[0].role"),
    (ask(messages=[{"role": "user"}]), "messages[0].content"),
    (ask(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (ask(messages=[{"role": "user", "content": None}]), "messages[0].content"),
    (blocks("hi"), HERE),
    (blocks({"text": "hi"}), f"{HERE}.type"),
    (blocks({"type": "text"}), f"{HERE}.text"),
    (blocks({"type": "text", "text": 5}), f"{HERE}.text"),
    (blocks({"type": "text", "text": None}), f"{HERE}.text"),
    (blocks(IMAGE), f"{HERE}.type"),
    (blocks({"type": "server_tool_use", "id": "x"}, role="assistant"), f"{HERE}.type"),
    (blocks({"type": "tool_result", "tool_use_id": "c"}, role="assistant"), f"{HERE}.type"),
    (blocks({"type": "tool_use", "id": "c", "name": "f", "input": {}}), f"{HERE}.type"),
    (blocks(IMAGE, role="system"), f"{HERE}.type"),
    (blocks({"type": "document"}), f"{HERE}.source"),
    (document(type="base64", data="", media_type="application/pdf"), f"{HERE}.source.type"),
    (document(type="url", url="https://example.com/a.pdf"), f"{HERE}.source.type"),
    (document(type="file", file_id="f"), f"{HERE}.source.type"),
    (document(type="text"), f"{HERE}.source.data"),
    (document(type="content", content=[IMAGE]), f"{HERE}.source.content[0].type"),
    (
        blocks(
            {
                "type": "document",
                "source": {"type": "text", "data": "x"},
                "citations": {"enabled": True},
            }
        ),
        f"{HERE}.citations.enabled",
    ),
    (blocks({"type": "search_result", "source": "s", "content": []}), f"{HERE}.title"),
    (
        blocks({"type": "search_result", "source": "s", "title": "t", "content": "x"}),
        f"{HERE}.content",
    ),
    (
        blocks({"type": "tool_use", "id": "c", "name": "f", "input": "{}"}, role="assistant"),
        f"{HERE}.input",
    ),
    (
        blocks({"type": "tool_use", "id": "", "name": "f", "input": {}}, role="assistant"),
        f"{HERE}.id",
    ),
    (result(content=[IMAGE]), "messages[2].content[0].content[0].type"),
    (result(content=5), "messages[2].content[0].content"),
    (result(is_error="no"), "messages[2].content[0].is_error"),
    (result(tool_use_id="d"), "messages[2].content[0].tool_use_id"),
    (ask(system=5), "system"),
    (ask(system=[IMAGE]), "system[0].type"),
    (ask(tools="search"), "tools"),
    (ask(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
    (ask(tools=[{"name": "f"}]), "tools[0].input_schema"),
    (ask(tools=[{"name": "f", "input_schema": {"type": "string"}}]), "tools[0].input_schema"),
    (ask(tools=[{**TOOL, "name": "f g"}]), "tools[0].name"),
    (ask(tools=[{**TOOL, "name": ""}]), "tools[0].name"),
    (ask(tools=[TOOL, TOOL]), "tools"),
    (ask(tool_choice={"type": "any"}), "tool_choice"),
    (ask(tool_choice="auto"), "tool_choice"),
    (choice(type="required"), "tool_choice.type"),
    (choice(type="tool"), "tool_choice.name"),
    (choice(type="tool", name="g"), "tool_choice.name"),
    (choice(type="auto", disable_parallel_tool_use="no"), "tool_choice.disable_parallel_tool_use"),
    (ask(thinking={"type": "always"}), "thinking.type"),
    (ask(output_config={"format": {"type": "text"}}), "output_config.format.type"),
    (ask(output_config={"format": {"type": "json_schema"}}), "output_config.format.schema"),
    (ask(output_format={"type": "json_schema", "schema": {}}), "output_format"),
    (ask(mcp_servers=[{"type": "url", "url": "https://example.com", "name": "x"}]), "mcp_servers"),
]

BAD_OF_MESSAGES = [
    ({"model": "tiny", "messages": [USER]}, "max_tokens"),
    (ask(max_tokens=-1), "max_tokens"),
    (ask(max_tokens="5"), "max_tokens"),
    (ask(max_tokens=1.5), "max_tokens"),
    (ask(max_tokens=True), "max_tokens"),
    (ask(max_tokens=0, stream=True), "stream"),
    (ask(max_tokens=0, tools=[TOOL], tool_choice={"type": "any"}), "tool_choice"),
    (ask(max_tokens=0, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}), "tool_choice"),
    (
        ask(max_tokens=0, output_config={"format": {"type": "json_schema", "schema": {}}}),
        "output_config.format",
    ),
    (ask(max_tokens=0, thinking={"type": "enabled", "budget_tokens": 1024}), "thinking"),
    (ask(messages=[USER, {"role": "assistant", "content": "The"}]), "messages[1].role"),
    (ask(stop_sequences="END"), "stop_sequences"),
    (ask(stop_sequences=[""]), "stop_sequences[0]"),
    (ask(stop_sequences=["x"] * 17), "stop_sequences"),
    (ask(stream="yes"), "stream"),
    (ask(temperature=-0.1), "temperature"),
    (ask(temperature=2.1), "temperature"),
    (ask(temperature="hot"), "temperature"),
    (ask(temperature=float("nan")), "temperature"),
    (ask(top_p=0), "top_p"),
    (ask(top_p=1.1), "top_p"),
    (ask(top_k=-1), "top_k"),
    (ask(diagnostics="yes"), "diagnostics"),
    (ask(diagnostics={"previous_message_id": 5}), "diagnostics.previous_message_id"),
    (ask(ragcache={"explain": "yes"}), "ragcache.explain"),
    (ask(cache_salt=""), "cache_salt"),
]

NOT_JSON = [b"", b"{", b"[]", b"null", b"5", b"\xff\xfe{\x00}\x00", b'{"a": ' * 10_000]


@pytest.fixture
async def refused(http):
    """Post to a path; check the shape of the refusal, and that a good request still works."""

    async def refused(path=PATH, status=400, method="POST", **body):
        async with http.request(method, path, **body) as response:
            assert response.status == status
            error = await response.json()
            assert response.headers["request-id"] == error["request_id"]
        ErrorResponse.model_validate(error, strict=True)
        assert set(error) == {"type", "error", "request_id"}
        coded = {"code"} if status in (429, 503) else set()  # what a router goes by
        assert set(error["error"]) == {"type", "message"} | coded
        async with http.post(PATH, json=GOOD) as response:
            assert (await response.json())["content"][0]["text"] == "Hello, wörld 🌍!"
        return error["error"]

    return refused


@pytest.mark.parametrize(("body", "field"), BAD + BAD_OF_MESSAGES)
async def test_a_bad_field_is_named(refused, body, field):
    error = await refused(json=body)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(("body", "field"), BAD)
def test_counting_refuses_what_answering_refuses(body, field):
    with pytest.raises(InvalidRequest) as caught:
        parse(PromptFields, json.dumps(body).encode()).prompt()
    assert caught.value.param == field


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize("body", NOT_JSON, ids=range(len(NOT_JSON)))
async def test_what_is_not_a_json_object_is_refused(refused, path, body):
    assert (await refused(path, data=body))["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 10**12},
        {"stop_sequences": [" ", *"abcdefghijklmno"]},
        {"temperature": 0},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "disabled"}, "max_tokens": 0},
        {"thinking": {"type": "between_tools"}},
        {"tools": [{**TOOL, "type": "custom", "strict": True, "defer_loading": False}]},
        {"tools": [{**TOOL, "type": None, "cache_control": None}]},
        {"messages": [USER, {"role": "assistant", "content": []}, {"role": "user", "content": []}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "a"},
                {"role": "system", "content": "b"},
            ]
        },
        {"messages": [USER] * 400},
        {"system": None, "cache_control": None, "diagnostics": None},
        {"container": "c", "inference_geo": "eu", "speed": "fast", "user_profile_id": "u"},
    ],
)
async def test_odd_but_valid_requests_are_served(http, changes):
    async with http.post(PATH, json=ask(**changes)) as response:
        assert response.status == 200


async def test_a_conversation_that_ends_with_the_assistant_can_be_counted(http):
    turn = {"role": "assistant", "content": "a b"}
    async with http.post(COUNT, json={"model": "tiny", "messages": [USER, turn]}) as response:
        assert await response.json() == {"input_tokens": 5}


async def test_routes_methods_and_codings_are_refused_in_shape(refused, http):
    assert (await refused(f"{PATH}/batches", 404, json={}))["type"] == "not_found_error"
    assert (await refused(PATH, 405, "GET"))["type"] == "invalid_request_error"
    assert (await refused(COUNT, 405, "GET"))["type"] == "invalid_request_error"
    gzip = {"Content-Encoding": "gzip"}
    assert (await refused(PATH, 415, data=b"x", headers=gzip))["type"] == "invalid_request_error"
    async with http.post("/v1/messages_of_others", json={}) as response:
        assert set(await response.json()) == {"error"}


def test_a_named_tool_needs_its_name():
    with pytest.raises(InvalidRequest, match=r"^tool_choice\.name: is required$"):
        parse(PromptFields, json.dumps(choice(type="tool")).encode())


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            InvalidRequest("no such type", param="tools[3].function.parameters"),
            "tools[3].input_schema: no such type",
        ),
        (
            InvalidRequest("response_format: no such type", param="response_format"),
            "output_config.format: no such type",
        ),
        (
            InvalidRequest("the template cannot render these messages", param="messages"),
            "messages: the template cannot render these messages",
        ),
        (
            ContextLengthExceeded("prompt is too long: 9 tokens", param="messages"),
            "prompt is too long: 9 tokens",
        ),
    ],
)
def test_what_is_refused_later_names_the_field_too(refusal, message):
    error = Failure.of(refusal, "req-1").anthropic("req-1")["error"]
    assert error == {"type": "invalid_request_error", "message": message}


async def test_an_unknown_model_is_404(refused):
    for path in (PATH, COUNT):
        error = await refused(path, 404, json=ask(model="claude-99"))
        assert error["message"].startswith("model: the model 'claude-99'")
        assert error["type"] == "not_found_error"


async def test_the_client_raises_its_typed_errors(anthropic, serving):
    async def refusal(kind, **changes):
        with pytest.raises(kind) as caught:
            await anthropic.messages.create(**ask(**changes))
        assert caught.value.request_id.startswith("req-")
        return caught.value.type

    assert await refusal(BadRequestError, messages=[]) == "invalid_request_error"
    assert await refusal(BadRequestError, system="a " * 1000) == "invalid_request_error"
    assert await refusal(NotFoundError, model="x") == "not_found_error"
    for refuse, kind, name in [
        (Overloaded("the queue is full"), RateLimitError, "rate_limit_error"),
        (EngineUnavailable("loading"), InternalServerError, "overloaded_error"),
        (RuntimeError("a bug"), InternalServerError, "api_error"),
    ]:
        serving.script.refuse = refuse
        assert await refusal(kind) == name


async def test_a_wrong_key_is_401_and_both_headers_are_read(start):
    url = await start(api_keys=["secret"])
    async with aiohttp.ClientSession(url) as http:
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            async with http.post(PATH, json=GOOD, headers=headers) as response:
                assert response.status == 200
        async with http.post(PATH, json=GOOD) as response:
            assert (await response.json())["error"]["type"] == "authentication_error"
    async with AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(AuthenticationError):
            await client.messages.create(**GOOD)
        with pytest.raises(AuthenticationError):
            await client.messages.count_tokens(model="tiny", messages=[USER])
    async with AsyncAnthropic(base_url=url, api_key="secret", max_retries=0) as client:
        assert (await client.messages.create(**GOOD)).content


async def test_a_body_beyond_the_limit_is_413(start):
    url = await start(max_body_size=10_000)
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(ContentTooLargeError) as caught:
            await client.messages.create(**ask(system="x" * 10_000))
    assert caught.value.type == "request_too_large"


@pytest.mark.parametrize("refuse", [Overloaded("the queue is full"), EngineUnavailable("loading")])
async def test_the_client_retries_after_the_time_it_is_told(url, serving, monkeypatch, refuse):
    monkeypatch.setattr(type(refuse), "retry_after", 0)
    serving.script.refuse = refuse
    started = serving.start

    async def start(request):
        try:
            return await started(request)
        finally:
            serving.script.refuse = None

    monkeypatch.setattr(serving, "start", start)
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=1) as client:
        assert (await client.messages.create(**GOOD)).content[0].text == "Hello, wörld 🌍!"


async def test_a_refusal_says_when_to_come_back(http, serving):
    serving.script.refuse = Overloaded("the queue is full")
    async with http.post(PATH, json=ask(stream=True)) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert response.content_type == "application/json"


async def test_a_failure_in_the_stream_is_an_event_and_the_end(http, serving, anthropic):
    serving.script.fail_after = 3
    serving.script.failure = EngineUnavailable("the engine died")
    async with http.post(PATH, json=ask(stream=True)) as response:
        wire = await asyncio.wait_for(response.text(), 2)
        request_id = response.headers["request-id"]
    *_, last, end = wire.split("\n\n")
    assert end == ""
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "the engine died",
            "code": "engine_unavailable",
        },
        "request_id": request_id,
    }
    assert "message_delta" not in wire
    assert serving.generations[0].closed
    with pytest.raises(APIStatusError, match="engine died"):
        async with anthropic.messages.stream(**GOOD) as stream:
            await stream.get_final_message()


async def test_a_bug_in_the_stream_shows_no_details(http, serving, errors_logged):
    serving.script.fail_after = 1
    async with http.post(PATH, json=ask(stream=True)) as response:
        wire = await response.text()
    assert "internal error" in wire
    assert "broken" not in wire
    assert len(errors_logged()) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_every_status_has_its_type(status, kind):
    body = Failure(status, "why").body("/v1/messages/count_tokens", "req-1")
    assert body["error"] == {"type": kind, "message": "why"}


async def test_a_failure_of_a_whole_answer_is_a_status(anthropic, serving):
    serving.script.fail_after = 3
    serving.script.failure = GenerationFailed("no usable output")
    with pytest.raises(InternalServerError, match="no usable output"):
        await anthropic.messages.create(**GOOD)
