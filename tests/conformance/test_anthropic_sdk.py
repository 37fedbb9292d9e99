"""Anthropic's official client, synchronous and asynchronous, against the whole gateway."""

from __future__ import annotations

import json
from typing import Literal

import jsonschema_rs
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import OpenAI
from pydantic import BaseModel

BLOCK = 16
TEXT = "It is said that you will see a lighthouse."
PASSAGE = "The lighthouse keeper counts the ships that pass, and the days that do not. " * 4
SHORT = {"type": "ephemeral"}


def user(content):
    return {"role": "user", "content": content}


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "input_schema": schema}


def written(*calls):
    """Calls as the model writes them."""
    listed = [
        f'{{"name": "{name}", "arguments": {json.dumps(args, ensure_ascii=False)}}}'
        for name, args in calls
    ]
    return f"<tool_call>[{', '.join(listed)}]</tool_call>"


def called(message):
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


ASK = {"model": "tiny", "messages": [user("Where am I?")], "max_tokens": 100}
GREEDY = {"extra_body": {"temperature": 0}}
TOOLS = [tool("weather", city={"type": "string"}), tool("clock", zone={"enum": ["UTC", "CET"]})]
OSLO = ("weather", {"city": "Oslo"})
UTC = ("clock", {"zone": "UTC"})
CLOCK = {"type": "tool", "name": "clock"}
ANY = {"type": "any"}


class Place(BaseModel):
    city: str
    height: int


class Report(BaseModel):
    unit: Literal["C", "F"]
    note: str | None
    place: Place


REPORT = Report(unit="C", note=None, place=Place(city="Łódź", height=220))
REPORT_TEXT = json.dumps(REPORT.model_dump(), ensure_ascii=False)
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["unit", "note"],
}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


@pytest.fixture
def client(gateway, connect):
    return connect(Anthropic, AsyncAnthropic, base_url=gateway.url, api_key="none", max_retries=0)


@pytest.fixture
def ask(gateway):
    """A message, where the kind of client makes no difference."""

    def ask(**changes):
        return client.messages.create(**{**ASK, **GREEDY, **changes})

    with Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield ask


def test_an_answer_is_what_the_model_says(client):
    answer = client.messages.create(**ASK)
    assert [block.type for block in answer.content] == ["text"]
    assert (text(answer), answer.stop_reason, answer.stop_sequence) == (TEXT, "end_turn", None)
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")


def test_a_raw_response_carries_the_request_id(client):
    headers = {"x-request-id": "trace-7"}
    raw = client.messages.with_raw_response.create(**ASK, extra_headers=headers)
    assert raw.headers["request-id"] == "trace-7"
    assert client.messages.create(**ASK)._request_id.startswith("req-")


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list().data] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"


@pytest.mark.parametrize(
    ("choice", "said", "expected"),
    [
        ({"type": "auto"}, TEXT, []),
        ({"type": "auto"}, written(OSLO), [OSLO]),
        ({"type": "auto"}, written(OSLO, UTC), [OSLO, UTC]),
        ({"type": "auto", "disable_parallel_tool_use": True}, written(OSLO, UTC), [OSLO]),
        (ANY, written(UTC), [UTC]),
        ({**ANY, "disable_parallel_tool_use": True}, written(UTC, OSLO), [UTC]),
        (CLOCK, written(UTC), [UTC]),
        ({"type": "none"}, TEXT, []),
    ],
)
def test_a_choice_of_tools_allows_what_it_says(ask, gateway, choice, said, expected):
    gateway.script.text = said
    answer = ask(tools=TOOLS, tool_choice=choice)
    assert called(answer) == expected
    assert text(answer) == ("" if expected else TEXT)
    assert answer.stop_reason == ("tool_use" if expected else "end_turn")


@pytest.mark.parametrize(
    ("choice", "said", "names"),
    [
        (ANY, TEXT, {"weather", "clock"}),
        (CLOCK, TEXT, {"clock"}),
        (CLOCK, written(OSLO), {"clock"}),
        ({"type": "none"}, written(OSLO), set()),
        ({"type": "auto"}, written(("clock", {"zone": "Mars"})), {"clock"}),
    ],
)
def test_a_model_that_would_say_something_else_is_held_to_it(ask, gateway, choice, said, names):
    gateway.script.text = said
    calls = called(ask(tools=TOOLS, tool_choice=choice))
    assert bool(calls) == bool(names)
    assert {name for name, _ in calls} <= names
    schemas = {each["name"]: each["input_schema"] for each in TOOLS}
    for name, arguments in calls:
        jsonschema_rs.validate(schemas[name], arguments)


def test_a_result_goes_back_to_the_model_that_called(client, gateway):
    gateway.script.rules = [("weather in Oslo", f"Let me see. {written(OSLO, UTC)}")]
    messages = [user("The weather in Oslo?")]
    options = {"system": "Be brief.", "tools": TOOLS}
    first = client.messages.create(**{**ASK, "messages": messages}, **options)
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "18 degrees"}
        for block in first.content
        if block.type == "tool_use"
    ]
    turn = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    messages += [turn, user(results)]
    second = client.messages.create(**{**ASK, "messages": messages}, **options)
    assert text(second) == TEXT
    assert second.usage.cache_read_input_tokens >= total(first.usage) // BLOCK * BLOCK > 0
    counted = client.messages.count_tokens(model="tiny", messages=messages, **options)
    assert counted.input_tokens == total(second.usage)


def total(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("said", ['{"unit": "C", "note": null}', TEXT])
def test_a_json_schema_is_kept_to(ask, gateway, said):
    gateway.script.text = said
    answer = ask(output_config=FORMAT)
    jsonschema_rs.validate(SCHEMA, json.loads(text(answer)))
    assert (text(answer) == said) == (said != TEXT)
    assert answer.stop_reason == "end_turn"


def test_answers_are_parsed_into_models(client, gateway):
    gateway.script.text = REPORT_TEXT
    assert client.messages.parse(**ASK, output_format=Report).parsed_output == REPORT
    gateway.script.text = TEXT
    answer = client.messages.parse(**ASK, **GREEDY, output_format=Report)
    assert isinstance(answer.parsed_output, Report)


def test_a_call_instead_of_the_output_that_was_asked_for(client, gateway):
    gateway.script.text = written(OSLO)
    answer = client.messages.parse(**ASK, tools=TOOLS, output_format=Report)
    assert (called(answer), answer.parsed_output) == ([OSLO], None)


STREAMED = {
    "text": (TEXT, {}),
    "characters of several tokens": ("Łódź 🌍 你好", {}),
    "limit": (TEXT, {"max_tokens": 3}),
    "stop": (TEXT, {"stop_sequences": ["never", "light"]}),
    "call": (written(OSLO), {"tools": TOOLS}),
    "text and calls": (f"Let me see. {written(OSLO, UTC)}", {"tools": TOOLS}),
    "forced": (TEXT, {"tools": TOOLS, "tool_choice": ANY}),
    "schema": (TEXT, {"output_config": FORMAT}),
    "marked": (TEXT, {"system": [{"type": "text", "text": PASSAGE, "cache_control": SHORT}]}),
}


def summary(message):
    """All but the ids, which are new every time, and what only the streaming helper adds."""
    message = message.to_dict()
    ids = [message.pop("id"), *(block.pop("id", None) for block in message["content"])]
    assert all(ids) or any(block["type"] == "text" for block in message["content"])
    return {key: value for key, value in message.items() if value is not None}


@pytest.mark.parametrize("case", STREAMED)
def test_a_stream_adds_up_to_the_whole_answer(client, gateway, case):
    gateway.script.text, options = STREAMED[case]
    options = {**ASK, **GREEDY, **options}
    client.messages.create(**options)  # so that both find the same in the cache
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == text(whole)
    assert summary(final) == summary(whole)


def test_streamed_output_is_parsed_too(client, gateway):
    gateway.script.text = REPORT_TEXT
    with client.messages.stream(**ASK, output_format=Report) as stream:
        assert stream.get_final_message().parsed_output == REPORT


def test_events_come_in_their_order(client, gateway):
    gateway.script.text = f"Let me see. {written(OSLO)}"
    events = [event.type for event in client.messages.create(**ASK, tools=TOOLS, stream=True)]
    changes = [
        event for event, before in zip(events, [None, *events], strict=False) if event != before
    ]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert changes == ["message_start", *block, *block, "message_delta", "message_stop"]


def test_a_stop_sequence_is_reported(ask):
    answer = ask(stop_sequences=["never", "lighthouse"])
    assert text(answer) == TEXT.partition("lighthouse")[0]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "lighthouse")
    assert ask(max_tokens=2).stop_reason == "max_tokens"


def test_tokens_are_counted_as_they_are_charged_on_both_wires(client, ask, gateway):
    prompt = {"model": "tiny", "system": PASSAGE, "messages": [user("Where?")], "tools": TOOLS}
    counted = client.messages.count_tokens(**prompt).input_tokens
    cold = ask(**prompt)
    assert total(cold.usage) == counted
    assert cold.usage.cache_read_input_tokens == 0
    functions = [
        {
            "type": "function",
            "function": {"name": each["name"], "parameters": each["input_schema"]},
        }
        for each in TOOLS
    ]
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as other:
        answer = other.chat.completions.create(
            model="tiny",
            messages=[{"role": "system", "content": PASSAGE}, user("Where?")],
            tools=functions,
        )
    assert answer.usage.prompt_tokens == counted
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached == (counted - 1) // BLOCK * BLOCK > 0


def test_nothing_may_be_asked_for_to_warm_the_cache(ask):
    system = [{"type": "text", "text": PASSAGE, "cache_control": SHORT}]
    warmed = ask(system=system, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == (
        [],
        "max_tokens",
        0,
    )
    written_tokens = warmed.usage.cache_creation_input_tokens
    assert written_tokens % BLOCK == 0
    assert written_tokens > BLOCK
    answer = ask(system=system, messages=[user("Something else, then?")])
    assert answer.usage.cache_read_input_tokens >= written_tokens
    assert answer.usage.cache_creation_input_tokens == 0


CHANGES = {
    "tools_changed": {"tools": TOOLS[:1]},
    "system_changed": {"system": PASSAGE.replace("ships", "boats")},
    "messages_changed": {"messages": [user(PASSAGE), user("Where am I?")]},
}


@pytest.mark.parametrize("reason", CHANGES)
def test_diagnostics_say_what_changed(ask, reason):
    told = {
        "tools": TOOLS,
        "system": PASSAGE,
        "messages": [user(PASSAGE.replace("ships", "birds")), user("Where am I?")],
        "diagnostics": {"previous_message_id": None},
    }
    first = ask(**told)
    assert first.diagnostics is None
    told["diagnostics"] = {"previous_message_id": first.id}
    assert ask(**told).diagnostics is None
    found = ask(**{**told, **CHANGES[reason]})
    missed = found.diagnostics.cache_miss_reason
    assert missed.type == reason
    lost = total(first.usage) - found.usage.cache_read_input_tokens
    assert 0 < missed.cache_missed_input_tokens <= lost


def test_diagnostics_do_not_know_every_request(ask):
    answer = ask(diagnostics={"previous_message_id": "msg_unknown"})
    assert answer.diagnostics.cache_miss_reason.type == "previous_message_not_found"
    assert ask().diagnostics is None


@pytest.mark.parametrize("method", ["create", "stream"])
def test_the_beta_client_works_too(client, method):
    if method == "create":
        answer = client.beta.messages.create(**ASK, betas=["made-up-2026-01-01"])
    else:
        with client.beta.messages.stream(**ASK) as stream:
            answer = stream.get_final_message()
    assert text(answer) == TEXT
