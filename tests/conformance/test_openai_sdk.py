"""OpenAI's official client, synchronous and asynchronous, against the whole gateway."""

from __future__ import annotations

import json
from typing import Literal

import jsonschema_rs
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

BLOCK = 16
NO_END = {"2": -100}
TEXT = "It is said that you will see a lighthouse."


def user(text):
    return {"role": "user", "content": text}


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


def written(*calls):
    """Calls as the model writes them."""
    listed = [
        f'{{"name": "{name}", "arguments": {json.dumps(args, ensure_ascii=False)}}}'
        for name, args in calls
    ]
    return f"<tool_call>[{', '.join(listed)}]</tool_call>"


def called(message):
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]


ASK = {"model": "tiny", "messages": [user("Where am I?")], "max_tokens": 100, "temperature": 0}
TOOLS = [tool("weather", city={"type": "string"}), tool("clock", zone={"enum": ["UTC", "CET"]})]
OSLO = ("weather", {"city": "Oslo"})
UTC = ("clock", {"zone": "UTC"})
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "height": {"type": "integer"}},
            "required": ["city", "height"],
        },
    },
    "required": ["unit", "note", "place"],
}
JSON = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA}}


class Place(BaseModel):
    city: str
    height: int


class Report(BaseModel):
    """What SCHEMA describes."""

    unit: Literal["C", "F"]
    note: str | None
    place: Place


REPORT = Report(unit="C", note=None, place=Place(city="Łódź", height=220))
REPORT_TEXT = json.dumps(REPORT.model_dump(), ensure_ascii=False)


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture
def client(gateway, connect):
    return connect(OpenAI, AsyncOpenAI, base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def ask(gateway):
    """The first choice of a chat completion, where the kind of client makes no difference."""

    def ask(**changes):
        return client.chat.completions.create(**{**ASK, **changes}).choices[0]

    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield ask


def test_an_answer_is_what_the_model_says(client):
    answer = client.chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (TEXT, "stop")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens > BLOCK


def test_a_raw_response_carries_the_request_id(client):
    headers = {"x-request-id": "trace-7"}
    raw = client.chat.completions.with_raw_response.create(**ASK, extra_headers=headers)
    assert raw.headers["x-request-id"] == "trace-7"
    assert raw.parse().choices[0].message.content == TEXT
    assert client.chat.completions.create(**ASK)._request_id.startswith("req-")


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list().data] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"


@pytest.mark.parametrize(
    ("choice", "said", "expected"),
    [
        ("auto", TEXT, []),
        ("auto", written(OSLO), [OSLO]),
        ("auto", written(OSLO, UTC), [OSLO, UTC]),
        ("required", written(UTC), [UTC]),
        (named("clock"), written(UTC), [UTC]),
        ("none", TEXT, []),
        (allowed("auto", "clock"), TEXT, []),
        (allowed("auto", "clock"), written(UTC), [UTC]),
        (allowed("required", "weather"), written(OSLO), [OSLO]),
    ],
)
def test_a_choice_of_tools_allows_what_it_says(ask, gateway, choice, said, expected):
    gateway.script.text = said
    answer = ask(tools=TOOLS, tool_choice=choice)
    assert called(answer.message) == expected
    assert answer.message.content == (None if expected else TEXT)
    assert answer.finish_reason == ("tool_calls" if expected else "stop")


@pytest.mark.parametrize(
    ("choice", "said", "names"),
    [
        ("required", TEXT, {"weather", "clock"}),
        (named("clock"), TEXT, {"clock"}),
        (named("clock"), written(OSLO), {"clock"}),
        (allowed("required", "weather"), written(UTC), {"weather"}),
        (allowed("auto", "clock"), written(OSLO), {"clock"}),
        ("none", written(OSLO), set()),
        ("auto", written(("clock", {"zone": "Mars"})), {"clock"}),
    ],
)
def test_a_model_that_would_say_something_else_is_held_to_it(ask, gateway, choice, said, names):
    gateway.script.text = said
    answer = ask(tools=TOOLS, tool_choice=choice)
    calls = called(answer.message)
    assert bool(calls) == bool(names)
    assert {name for name, _ in calls} <= names
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    for name, arguments in calls:
        jsonschema_rs.validate(schemas[name], arguments)
    assert answer.finish_reason == ("tool_calls" if names else "stop")


def test_one_call_at_a_time_when_asked_for(ask, gateway):
    gateway.script.text = written(OSLO, UTC)
    assert called(ask(tools=TOOLS, parallel_tool_calls=True).message) == [OSLO, UTC]
    assert called(ask(tools=TOOLS, parallel_tool_calls=False).message) == [OSLO]


def test_the_tokens_do_not_depend_on_what_the_output_may_be(client):
    def prompt_tokens(**rules):
        answer = client.chat.completions.create(**{**ASK, "max_tokens": 1}, tools=TOOLS, **rules)
        details = answer.usage.prompt_tokens_details
        return answer.usage.prompt_tokens, details.cached_tokens

    tokens, cold = prompt_tokens()
    warm = (tokens - 1) // BLOCK * BLOCK
    assert (cold, warm > 0) == (0, True)
    for choice in ("none", "required", named("clock"), allowed("auto", "weather")):
        assert prompt_tokens(tool_choice=choice) == (tokens, warm)
    assert prompt_tokens(response_format=JSON) == (tokens, warm)
    assert prompt_tokens(parallel_tool_calls=False) == (tokens, warm)


def test_a_result_goes_back_to_the_model_that_called(client, gateway):
    gateway.script.rules = [("weather in Oslo", written(OSLO, UTC))]
    messages = [{"role": "system", "content": "Be brief."}, user("The weather in Oslo?")]
    ask = {**ASK, "tools": TOOLS}
    first = client.chat.completions.create(**{**ask, "messages": messages})
    message = first.choices[0].message
    assert len({call.id for call in message.tool_calls}) == 2
    messages += [
        message.model_dump(exclude_none=True),
        *(
            {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
            for call in message.tool_calls
        ),
    ]
    second = client.chat.completions.create(**{**ask, "messages": messages})
    assert second.choices[0].message.content == TEXT
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens // BLOCK * BLOCK > 0
    messages[2]["tool_calls"][0]["function"]["arguments"] = {"city": "Oslo"}  # not as a string
    again = client.chat.completions.create(**{**ask, "messages": messages})
    assert again.usage.prompt_tokens == second.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens - BLOCK


def test_a_json_object_is_one_whatever_the_model_wants(ask, gateway):
    gateway.script.text = '{"setup": "Why?", "punchline": [1, null]}'
    content = ask(response_format={"type": "json_object"}).message.content
    assert content == gateway.script.text
    gateway.script.text = TEXT
    content = ask(response_format={"type": "json_object"}).message.content
    assert isinstance(json.loads(content), dict)


@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("said", [REPORT_TEXT, TEXT])
def test_a_json_schema_is_kept_to(ask, gateway, said, strict):
    gateway.script.text = said
    wanted = {**JSON, "json_schema": {**JSON["json_schema"], "strict": strict}}
    answer = ask(response_format=wanted)
    assert answer.finish_reason == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(answer.message.content))
    assert (answer.message.content == REPORT_TEXT) == (said == REPORT_TEXT)


def test_json_or_calls_beside_a_schema(ask, gateway):
    options = {"tools": TOOLS, "response_format": JSON}
    gateway.script.text = written(OSLO)
    assert called(ask(**options).message) == [OSLO]
    gateway.script.text = REPORT_TEXT
    assert ask(**options).message.content == REPORT_TEXT


def test_answers_are_parsed_into_models(client, gateway):
    gateway.script.text = REPORT_TEXT
    answer = client.chat.completions.parse(**ASK, response_format=Report)
    assert answer.choices[0].message.parsed == REPORT
    gateway.script.text = TEXT
    answer = client.chat.completions.parse(**ASK, response_format=Report)
    assert isinstance(answer.choices[0].message.parsed, Report)
    gateway.script.text = written(("Report", REPORT.model_dump()))
    answer = client.chat.completions.parse(**ASK, tools=[pydantic_function_tool(Report)])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == REPORT


STREAMED = {
    "text": (TEXT, {}),
    "characters of several tokens": ("Łódź 🌍 你好", {}),
    "stop": (TEXT, {"stop": ["light", "never"]}),
    "log-probabilities": (TEXT, {"logprobs": True, "top_logprobs": 2}),
    "choices": (TEXT, {"n": 3, "seed": 5}),
    "call": (written(OSLO), {"tools": TOOLS}),
    "text and calls": (f"Let me see. {written(OSLO, UTC)}", {"tools": TOOLS}),
    "forced": (TEXT, {"tools": TOOLS, "tool_choice": "required"}),
    "schema": (TEXT, {"response_format": JSON}),
    "model": (REPORT_TEXT, {"response_format": Report}),
}


def summary(completion):
    """All but ids and time, which are new every time, and the index of a call in its stream."""
    hidden = {"id": True, "created": True}
    calls = {"tool_calls": {"__all__": {"id": True, "index": True}}}
    return completion.model_dump(
        warnings=False, exclude={**hidden, "choices": {"__all__": {"message": calls}}}
    )


@pytest.mark.parametrize("case", STREAMED)
def test_a_stream_adds_up_to_the_whole_answer(client, gateway, case):
    gateway.script.text, options = STREAMED[case]
    options = {**ASK, **options}
    client.chat.completions.parse(**options)  # so that both find the same in the cache
    whole = client.chat.completions.parse(**options)
    with client.chat.completions.stream(
        **options, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert summary(final) == summary(whole)
    deltas = [event.delta for event in events if event.type == "content.delta"]
    if len(whole.choices) == 1:
        assert "".join(deltas) == (whole.choices[0].message.content or "")


def test_chunks_share_a_head_and_end_once(client):
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks].count("stop") == 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
    assert all(chunk.usage is None for chunk in chunks)


def test_log_probabilities_spell_the_text(ask):
    content = ask(logprobs=True, top_logprobs=2).logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == TEXT
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob > entry.top_logprobs[1].logprob


def test_a_stop_string_ends_the_text_before_it(ask):
    answer = ask(stop="lighthouse")
    assert (answer.message.content, answer.finish_reason) == (
        TEXT.partition("lighthouse")[0],
        "stop",
    )
    answer = ask(max_completion_tokens=2)
    assert answer.finish_reason == "length"
    assert TEXT.startswith(answer.message.content)


def test_choices_differ_and_come_again_with_the_same_seed(client):
    def texts(seed):
        answer = client.completions.create(
            model="tiny", prompt="x", n=3, seed=seed, max_tokens=8, logit_bias=NO_END
        )
        assert answer.usage.completion_tokens == 24
        return [choice.text for choice in answer.choices]

    first = texts(1)
    assert len(set(first)) == 3
    assert texts(1) == first
    assert texts(2) != first


PASSAGE = "The lighthouse keeper counts the ships that pass, and the days that do not. " * 4


def test_echoed_log_probabilities_are_the_same_cold_and_warm(client):
    def logprobs(**options):
        answer = client.completions.create(
            model="tiny",
            prompt=PASSAGE,
            temperature=0,
            logit_bias=NO_END,
            **{"max_tokens": 4, **options},
        )
        return answer.choices[0], answer.usage

    cold, usage = logprobs(echo=True, logprobs=2)
    assert cold.text.startswith(PASSAGE)
    assert len(cold.logprobs.tokens) == usage.total_tokens
    assert cold.logprobs.token_logprobs[0] is None
    assert None not in cold.logprobs.token_logprobs[1:]
    plain, usage = logprobs()
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert cold.text == PASSAGE + plain.text
    warm, _ = logprobs(echo=True, logprobs=2)
    assert warm == cold
    scored, usage = logprobs(echo=True, logprobs=2, max_tokens=0)
    assert (scored.text, scored.finish_reason, usage.completion_tokens) == (PASSAGE, "length", 0)
    count = usage.prompt_tokens
    assert scored.logprobs.token_logprobs == cold.logprobs.token_logprobs[:count]
    assert scored.logprobs.text_offset == cold.logprobs.text_offset[:count]


def test_nothing_may_be_asked_for_to_warm_the_cache(client):
    ask = {"model": "tiny", "prompt": PASSAGE}
    assert client.completions.create(**ask, max_tokens=0).choices[0].text == ""
    usage = client.completions.create(**ask, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // BLOCK * BLOCK


def test_streamed_completions_add_up_to_the_whole_answer(client):
    ask = {"model": "tiny", "prompt": PASSAGE, "echo": True, "logprobs": 1, "temperature": 0}
    whole = client.completions.create(**ask).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**ask, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    told = [part.logprobs for part in parts if part.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in told for item in getattr(part, name)] == getattr(
            whole.logprobs, name
        )
