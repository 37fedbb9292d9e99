"""The bodies of an engine in this process, which callers keep where our types are unknown."""

import pytest

from ragcache.embedded import EmbeddedGateway

JSON_TYPES = {dict, list, str, int, float, bool, type(None)}
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Which lamps are lit tonight?"}],
    "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {}}}],
    "logprobs": True,
    "top_logprobs": 2,
    "ragcache": {"explain": True},
}


@pytest.fixture
def engine(gateway):
    gateway.script.rules = [("lamps", '<tool_call>[{"name": "look_up", "arguments": {}}]')]
    return EmbeddedGateway(gateway.serving)


def types_in(value):
    yield type(value)
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    for each in inner if isinstance(inner, list) else ():
        yield from types_in(each)


async def test_whole_answers_hold_nothing_but_json(engine):
    body = await engine.complete(BODY)
    (choice,) = body["choices"]
    assert (choice["finish_reason"], body["ragcache"]["reason"]) == ("tool_calls", "cold")
    assert choice["message"]["tool_calls"]
    assert choice["logprobs"]["content"]
    assert set(types_in(body)) == JSON_TYPES


async def test_chunks_hold_nothing_but_json(engine):
    wanted = {**BODY, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in engine.stream(wanted)]
    assert chunks[-1]["ragcache"]["reason"] == "cold"
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert set(types_in(chunks)) == JSON_TYPES
