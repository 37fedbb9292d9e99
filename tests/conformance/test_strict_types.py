"""Every body, chunk and event is, in strict mode, what the official clients' types say."""

from __future__ import annotations

import json
from typing import Literal

import anthropic.types
import httpx2
import openai.types
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

TEXT = "It is said that you will see a lighthouse. Łódź 🌍"
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_call>'
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Where am I?"}], "max_tokens": 60}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
PASSAGE = "The lighthouse keeper counts the ships that pass, and the days that do not. " * 4
MARKED = [{"type": "text", "text": PASSAGE, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]

CHATS = {
    "text": {},
    "length": {"max_tokens": 2},
    "stop": {"stop": "light"},
    "choices": {"n": 2, "temperature": 2, "seed": 1},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "calls": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    "schema": {"response_format": FORMAT, "logprobs": True},
    "marked": {"messages": [{"role": "user", "content": MARKED}]},
}
TEXTS = {
    "text": {},
    "tokens": {"prompt": [5, 6, 7]},
    "several": {"prompt": ["a", "b"], "n": 2},
    "log-probabilities": {"logprobs": 3, "logit_bias": {"2": -100}},
    "nothing": {"max_tokens": 0},
}
MESSAGES = {
    "text": {},
    "length": {"max_tokens": 2},
    "stop": {"stop_sequences": ["light"]},
    "calls": {
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any"},
    },
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "marked": {"system": MARKED, "cache_control": {"type": "ephemeral"}},
    "diagnosed": {"diagnostics": {"previous_message_id": "msg_unknown"}},
}


class NullableLogprobs(Logprobs):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class NullableChoice(CompletionChoice):
    finish_reason: Literal["stop", "length"] | None
    logprobs: NullableLogprobs | None


class NullableCompletion(Completion):
    """The client's type, with the nulls that OpenAI documents and the type leaves out.

    In a stream there is no finish reason before the end, and the first token of an echoed prompt
    has no log-probability.
    """

    choices: list[NullableChoice]


# The last usage of a stream is the whole one: LangChain takes the ttls from there.
OF_WHOLE_USAGE = {"cache_creation", "service_tier"}


@pytest.fixture
def post(gateway):
    """Posts a body, after saying a call where the model is to write one."""

    def post(path, body, status=200):
        gateway.script.text = CALL if "tools" in body else TEXT
        response = httpx2.post(f"{gateway.url}{path}", json=body)
        assert response.status_code == status
        return response.text

    return post


def strict(kind, text, beyond=frozenset()):
    """Parse JSON as `kind`, which must know every field but those in `beyond`."""
    value = TypeAdapter(kind).validate_json(text, strict=True)
    assert unknown(value) == beyond
    return value


def unknown(value):
    """The names of all fields that the types do not have."""
    if isinstance(value, BaseModel):
        inner = unknown([getattr(value, name) for name in type(value).model_fields])
        return inner | set(value.model_extra or ())
    if isinstance(value, list):
        return set().union(*map(unknown, value))
    return set()


def data_of(stream):
    return [line[6:] for line in stream.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("case", CHATS)
def test_chat_completions(post, case):
    body = {**ASK, **CHATS[case]}
    whole = strict(ChatCompletion, post("/v1/chat/completions", body))
    assert bool(whole.choices[0].message.tool_calls) == (case == "calls")
    for options in ({}, {"stream_options": {"include_usage": True}}):
        stream = post("/v1/chat/completions", {**body, "stream": True, **options})
        *chunks, done = data_of(stream)
        assert done == "[DONE]"
        for chunk in chunks:
            strict(ChatCompletionChunk, chunk)


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("echo", [False, True])
def test_completions(post, case, echo):
    body = {"model": "tiny", "prompt": PASSAGE, "echo": echo, **TEXTS[case]}
    strict(NullableCompletion if echo else Completion, post("/v1/completions", body))
    *chunks, done = data_of(post("/v1/completions", {**body, "stream": True}))
    assert done == "[DONE]"
    for chunk in chunks:
        strict(NullableCompletion, chunk)


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(post, case):
    body = {**ASK, **MESSAGES[case]}
    whole = strict(Message, post("/v1/messages", body))
    assert any(block.type == "tool_use" for block in whole.content) == (case == "calls")
    for event in data_of(post("/v1/messages", {**body, "stream": True})):
        kind = json.loads(event)["type"]
        if kind != "ping":  # documented, and skipped by the client
            strict(
                RawMessageStreamEvent, event, OF_WHOLE_USAGE if kind == "message_delta" else set()
            )
    counted = {key: value for key, value in body.items() if key != "max_tokens"}
    strict(MessageTokensCount, post("/v1/messages/count_tokens", counted))


def test_models_are_what_both_clients_expect(gateway):
    model = httpx2.get(f"{gateway.url}/v1/models/tiny").text
    for kind in (openai.types.Model, anthropic.types.ModelInfo):  # each has fields of the other
        assert TypeAdapter(kind).validate_json(model, strict=True).id == "tiny"


def test_refusals(post):
    refusal = post("/v1/chat/completions", {**ASK, "n": 0}, 400)
    strict(ErrorObject, json.dumps(json.loads(refusal)["error"]))
    strict(ErrorResponse, post("/v1/messages", {**ASK, "messages": []}, 400))


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/chat/completions", ChatCompletion), ("/v1/messages", Message)]
)
def test_only_what_was_asked_for_is_beyond_the_types(post, path, kind):
    strict(kind, post(path, {**ASK, "ragcache": {"explain": True}}), {"ragcache"})
