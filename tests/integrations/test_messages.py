"""LangChain's messages on the wire, whichever provider's blocks they are made of."""

from __future__ import annotations

import json

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_ragcache.messages import wire_messages

CITIES = ["Oslo", "Rome", "Cairo"]
QUESTION = HumanMessage("How is the weather in Oslo, Rome and Cairo?")


def stated(city):
    return {"name": "weather", "args": {"city": city}, "id": f"call_{city}"}


def standard_block(city):
    return {"type": "tool_call", **stated(city)}


def anthropic_block(city):
    call = stated(city)
    return {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["args"]}


def result(city):
    return ToolMessage(f"fine in {city}", tool_call_id=f"call_{city}")


BLOCKS = pytest.mark.parametrize("block", [standard_block, anthropic_block])


def calls(wire):
    functions = [(call["id"], call["function"]) for call in wire.get("tool_calls", ())]
    return [(id, each["name"], json.loads(each["arguments"])) for id, each in functions]


ALL = [(f"call_{city}", "weather", {"city": city}) for city in CITIES]


@BLOCKS
def test_calls_that_are_only_in_the_content_are_sent(block):
    text = {"type": "text", "text": "Let me look."}
    [wire] = wire_messages([AIMessage([text, *map(block, CITIES)])])
    assert calls(wire) == ALL
    assert wire["content"] == [text]
    [wire] = wire_messages([AIMessage([block("Oslo")])])
    assert (calls(wire), wire["content"]) == (ALL[:1], None)


@BLOCKS
def test_calls_that_are_in_the_content_too_are_sent_once(block):
    [wire] = wire_messages([AIMessage([*map(block, CITIES)], tool_calls=[stated("Oslo")])])
    assert calls(wire) == ALL


def test_standard_blocks_that_fill_the_field_of_calls_are_sent_once():
    [wire] = wire_messages([AIMessage(content_blocks=[standard_block(city) for city in CITIES])])
    assert calls(wire) == ALL


@BLOCKS
def test_results_stand_in_the_order_of_calls_that_are_only_in_the_content(block):
    mixed = [result(city) for city in ("Cairo", "Oslo", "Rome")]
    _, _, *results = wire_messages([QUESTION, AIMessage([*map(block, CITIES)]), *mixed])
    assert [each["tool_call_id"] for each in results] == [f"call_{city}" for city in CITIES]


@BLOCKS
def test_the_prompt_is_that_of_calls_in_their_own_field(model, block):
    def prompt(message):
        return [QUESTION, message, *map(result, CITIES)]

    expected = AIMessage("", tool_calls=[stated(city) for city in CITIES])
    first = model.invoke(prompt(expected)).usage_metadata
    second = model.invoke(prompt(AIMessage([*map(block, CITIES)]))).usage_metadata
    assert second["input_tokens"] == first["input_tokens"]
    assert second["input_token_details"]["cache_read"] == (first["input_tokens"] - 1) // 16 * 16


INCOMPLETE = [
    (HumanMessage([{"type": "text"}]), r"content\[0\]: a text block needs text"),
    (SystemMessage(["Hi", {"type": "text"}]), r"content\[1\]: a text block needs text"),
    (
        HumanMessage([{"type": "tool_result"}]),
        r"content\[0\]: a tool_result block needs tool_use_id",
    ),
    (
        HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]}]),
        r"content\[0\]\.content\[0\]: a text block needs text",
    ),
    (
        HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": [7]}]),
        r"content\[0\]\.content\[0\]: is neither a text nor a block",
    ),
    (
        HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": {"x": 1}}]),
        r"content\[0\]\.content: is neither a text nor a list of blocks",
    ),
    (
        AIMessage([{"type": "tool_use", "id": "1"}]),
        r"content\[0\]: a tool_use block needs name, input",
    ),
    (
        AIMessage([{"type": "tool_call", "name": "f", "args": {}}]),
        r"content\[0\]: a tool_call block needs id",
    ),
    (
        AIMessage(["", {"type": "tool_use", "id": "1"}], tool_calls=[stated("Oslo")]),
        r"content\[1\]: a tool_use block needs name, input",
    ),
]


@pytest.mark.parametrize(("message", "named"), INCOMPLETE)
def test_a_block_that_lacks_a_field_is_named_with_its_place(message, named):
    with pytest.raises(ValueError, match=rf"^messages\[1\]\.{named}$"):
        wire_messages([QUESTION, message, QUESTION])


def test_of_calls_that_are_in_their_own_field_the_block_may_be_anything():
    block = {"type": "tool_use", "id": "call_Oslo", "partial_json": ""}
    [wire] = wire_messages([AIMessage([block], tool_calls=[stated("Oslo")])])
    assert calls(wire) == ALL[:1]
