"""/v1/messages through the official client."""

import asyncio
import json

import pytest
from anthropic import Anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from ragcache.types import Delta, FinishReason, ToolCall

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "say hello to me"}]
ASK = {"model": "tiny", "max_tokens": 100, "messages": HELLO}
TEXT = "Hello, wörld 🌍!"
EVENT = TypeAdapter(RawMessageStreamEvent)

WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TRICKY = {"city": 'Zür"ich\n{}', "days": [1, 2]}
CALLS = (
    Delta(0, "Let me "),
    Delta(0, "look."),
    Delta(0, calls=(ToolCall("weather", json.dumps(TRICKY)), ToolCall("weather", "{}"))),
    Delta(0, "Done."),
    Delta(0, finish_reason=FinishReason.TOOL_CALLS),
)


async def wire(http, **options):
    """The events of a stream as pairs of name and data."""
    async with http.post(PATH, json={**ASK, "stream": True, **options}) as response:
        assert response.status == 200
        raw = (await response.text()).removesuffix("\n\n").split("\n\n")
    lines = [event.split("\n") for event in raw]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in lines
    ]


def content(message):
    """The content without the ids of its calls, which are new every time."""
    return [block.model_dump(exclude={"id"}) for block in message.content]


async def test_a_whole_answer_has_text_reason_and_usage(anthropic, serving):
    serving.script.cached_tokens = 4
    answer = await anthropic.messages.create(**ASK)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert answer.id.startswith("msg_")
    assert [block.text for block in answer.content] == [TEXT]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (1, 4, 5)


async def test_the_synchronous_client_says_the_same(url):
    def ask():
        with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            whole = client.messages.create(**ASK).content[0].text
            with client.messages.stream(**ASK) as stream:
                return whole, "".join(stream.text_stream), stream.get_final_text()

    assert await asyncio.to_thread(ask) == (TEXT, TEXT, TEXT)


async def test_the_client_puts_a_stream_together(anthropic, serving):
    serving.script.cached_tokens = 4
    serving.script.written = {"5m": 1}
    whole = await anthropic.messages.create(**ASK)
    async with anthropic.messages.stream(**ASK) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == TEXT
    assert final.usage == whole.usage
    assert content(final) == content(whole)
    assert (final.stop_reason, final.model) == (whole.stop_reason, whole.model)


@pytest.mark.parametrize("method", ["create", "stream"])
async def test_the_beta_client_works_too(anthropic, method):
    if method == "create":
        answer = await anthropic.beta.messages.create(**ASK, betas=["made-up-2026-01-01"])
    else:
        async with anthropic.beta.messages.stream(**ASK) as stream:
            answer = await stream.get_final_message()
    assert answer.content[0].text == TEXT


async def test_older_clients_add_a_query_and_another_version(http):
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
    async with http.post(f"{PATH}?beta=true", json=ASK, headers=headers) as response:
        assert response.status == 200


async def test_calls_and_text_are_blocks_in_their_order(anthropic, serving):
    serving.script.deltas = CALLS
    whole = await anthropic.messages.create(**ASK, tools=[WEATHER])
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use", "text"]
    assert [block.text for block in whole.content if block.type == "text"] == [
        "Let me look.",
        "Done.",
    ]
    first, second = whole.content[1:3]
    assert (first.name, first.input, second.input) == ("weather", TRICKY, {})
    assert first.id.startswith("toolu_")
    assert first.id != second.id
    assert whole.stop_reason == "tool_use"
    async with anthropic.messages.stream(**ASK, tools=[WEATHER]) as stream:
        final = await stream.get_final_message()
    assert content(final) == content(whole)
    assert final.stop_reason == "tool_use"


async def test_an_answer_of_calls_only_has_no_block_of_text(anthropic, serving):
    serving.script.deltas = (
        Delta(0, calls=(ToolCall("weather", "{}"),), finish_reason=FinishReason.TOOL_CALLS),
    )
    whole = await anthropic.messages.create(**ASK, tools=[WEATHER])
    async with anthropic.messages.stream(**ASK, tools=[WEATHER]) as stream:
        final = await stream.get_final_message()
    assert [block.type for block in whole.content] == ["tool_use"]
    assert content(final) == content(whole)


async def test_an_empty_answer_has_no_content(anthropic, serving, http):
    serving.script.deltas = (Delta(0, finish_reason=FinishReason.STOP),)
    answer = await anthropic.messages.create(**ASK)
    assert (answer.content, answer.stop_reason) == ([], "end_turn")
    names = [name for name, _ in await wire(http)]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (Delta(0, finish_reason=FinishReason.STOP), "end_turn"),
        (Delta(0, finish_reason=FinishReason.LENGTH), "max_tokens"),
        (Delta(0, finish_reason=FinishReason.CONTEXT), "model_context_window_exceeded"),
        (Delta(0, "x", finish_reason=FinishReason.STOP, stop="END"), "stop_sequence"),
    ],
)
async def test_every_end_has_its_reason(anthropic, serving, last, reason):
    serving.script.deltas = (Delta(0, "a"), last)
    whole = await anthropic.messages.create(**ASK, stop_sequences=["END"])
    async with anthropic.messages.stream(**ASK, stop_sequences=["END"]) as stream:
        final = await stream.get_final_message()
    for answer in (whole, final):
        assert (answer.stop_reason, answer.stop_sequence) == (reason, last.stop)
        assert answer.content[0].text == "a" + last.text


async def test_the_wire_of_a_stream(http, serving):
    serving.script.deltas = CALLS
    serving.script.cached_tokens = 3
    events = await wire(http, tools=[WEATHER])
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        *["content_block_start", "content_block_delta", "content_block_delta"],
        *["content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    indexes = [data["index"] for _, data in events if "index" in data]
    assert indexes == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["output_tokens"] == 0
    for usage in (start["usage"], end["usage"]):
        assert usage["cache_read_input_tokens"] == 3
        assert usage["cache_creation_input_tokens"] == 0
    assert end["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("deltas", [None, CALLS])
async def test_every_body_and_event_is_what_the_client_expects(http, serving, deltas):
    serving.script.deltas = deltas
    serving.script.written = {"5m": 1, "1h": 1}
    async with http.post(PATH, json={**ASK, "diagnostics": {}}) as response:
        Message.model_validate_json(await response.read(), strict=True)
    for name, data in await wire(http):
        if name != "ping":
            EVENT.validate_json(json.dumps(data), strict=True)


async def test_the_headers_of_a_stream_keep_proxies_from_buffering(http):
    async with http.post(PATH, json={**ASK, "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"


async def test_a_stream_pings_as_long_as_it_is_silent(http, serving, anthropic, monkeypatch):
    monkeypatch.setattr("ragcache.gateway.anthropic.routes.KEEP_ALIVE", 0.01)
    serving.script.queued = asyncio.Event()
    async with http.post(PATH, json={**ASK, "stream": True}) as response:
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == (
                b'event: ping\ndata: {"type":"ping"}\n\n'
            )
        serving.script.queued.set()
        assert b"event: message_start" in await response.content.readuntil(b"\n\n")
    serving.script.pause = 0.03
    async with anthropic.messages.stream(**ASK) as stream:
        assert await stream.get_final_text() == TEXT


async def test_a_client_that_leaves_ends_its_generation(http, serving):
    serving.script.queued = asyncio.Event()
    async with http.post(PATH, json={**ASK, "stream": True}) as response:
        assert response.status == 200
    while not (serving.generations and serving.generations[0].closed):
        await asyncio.sleep(0.01)


async def test_the_request_id_is_a_header_of_both_names(anthropic, http):
    raw = await anthropic.messages.with_raw_response.create(**ASK)
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert (await raw.parse())._request_id == raw.headers["request-id"]
    async with http.post(PATH, json={**ASK, "stream": True}) as response:
        assert response.headers["request-id"].startswith("req-")


async def test_every_sampling_field_reaches_the_serving(anthropic, serving):
    await anthropic.messages.create(
        **ASK,
        stop_sequences=["a", "\n\n"],
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "adaptive"},
        output_config={"effort": "low"},
        extra_body={
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 3,
            "cache_salt": "pepper",
            "made_up_by_a_client": [1],
            "mcp_servers": [],
            "context_management": {"edits": []},
        },
    )
    request = serving.generations[0].request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.max_tokens, sampling.n, sampling.logprobs) == (100, 1, None)
    assert (request.stop, request.cache_salt, request.tenant) == (("a", "\n\n"), "pepper", "")
    assert request.id.startswith("msg_")
    assert not request.explicit_caching


async def test_null_means_not_given(http, serving):
    nulls = ["temperature", "system", "tools", "tool_choice", "stop_sequences", "cache_control"]
    async with http.post(PATH, json={**ASK, **dict.fromkeys(nulls)}) as response:
        assert response.status == 200
    assert serving.generations[0].request.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("choice", "rules"),
    [
        (None, ("auto", None, True)),
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "none"}, ("none", None, True)),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            ("required", ("weather",), False),
        ),
    ],
)
async def test_a_tool_choice_becomes_output_rules_and_leaves_the_prompt(
    http, serving, choice, rules
):
    body = {**ASK, "tools": [WEATHER], "tool_choice": choice}
    async with http.post(PATH, json=body) as response:
        assert response.status == 200
    request = serving.generations[0].request
    output = request.output
    assert (output.tool_choice, output.allowed_tools, output.parallel_tool_calls) == rules
    function = {key: WEATHER[key] for key in ("name", "description")}
    function["parameters"] = WEATHER["input_schema"]
    assert request.prompt.tools == ({"type": "function", "function": function},)


async def test_parse_sends_a_schema_and_reads_the_answer(anthropic, serving):
    class City(BaseModel):
        name: str
        people: int

    serving.script.pieces = ('{"name": "Zürich", ', '"people": 440000}')
    answer = await anthropic.messages.parse(**ASK, output_format=City)
    assert answer.parsed_output == City(name="Zürich", people=440000)
    schema = serving.generations[0].request.output.schema
    assert set(schema["properties"]) == {"name", "people"}


async def test_writing_the_cache_only_gives_no_content(anthropic, serving):
    serving.script.deltas = (Delta(0, finish_reason=FinishReason.LENGTH),)
    serving.script.written = {"5m": 4}
    answer = await anthropic.messages.create(**{**ASK, "max_tokens": 0})
    assert (answer.content, answer.stop_reason) == ([], "max_tokens")
    assert (answer.usage.output_tokens, answer.usage.cache_creation_input_tokens) == (0, 4)
    assert serving.generations[0].request.sampling.max_tokens == 0


@pytest.mark.parametrize("extra", [{}, {"system": "be brief"}, {"tools": [WEATHER]}])
async def test_counted_tokens_are_the_tokens_of_the_answer(anthropic, serving, extra):
    serving.script.cached_tokens, serving.script.written = 2, {"1h": 1}
    counted = await anthropic.messages.count_tokens(model="tiny", messages=HELLO, **extra)
    usage = (await anthropic.messages.create(**ASK, **extra)).usage
    total = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert counted.input_tokens == total
    assert len(serving.generations) == 1  # counting starts none


async def test_an_alias_is_named_in_the_answer_as_it_was_asked_for(anthropic):
    assert (await anthropic.messages.create(**{**ASK, "model": "alias"})).model == "alias"
