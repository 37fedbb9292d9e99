"""What LangChain and LangGraph pass on of an answer: all of it, once, in every kind of stream."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
from graphs import ALL, BLOCKING, SYSTEM, agent, each_of, weather
from langchain_core.messages import AIMessage, AIMessageChunk

pytestmark = [
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved"),
    pytest.mark.filterwarnings("ignore:The v3 streaming protocol"),
    pytest.mark.filterwarnings("ignore:.*version=.v3.:langchain_core._api.LangChainBetaWarning"),
]

QUESTION = "How is the weather in Oslo?"
ASK = {"messages": [("system", SYSTEM), ("user", QUESTION)]}
CALL = '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_call>'
LIMIT = {"recursion_limit": 12}
TOKENS = {"stream_mode": "messages", "subgraphs": True}


@pytest.fixture(autouse=True)
def script(gateway):
    gateway.script.rules = [("<tool_call>", CALL)]  # in prompts that tell of tools
    gateway.script.text = "It is 4 degrees: put on a coat, and a hat 🧢."
    return gateway.script


@pytest.fixture
def cold(model, gateway):
    """The chat model, before an empty cache."""

    def forget():
        gateway.http.post("/cache/reset").raise_for_status()
        return model

    return forget


def answers(messages):
    return [message for message in messages if isinstance(message, AIMessage)]


def told(message):
    """What a message says, without what is new in every one of them."""
    metadata = dict(message.response_metadata)
    explanation = dict(metadata.pop("ragcache"))
    explanation.pop("previous")
    return {
        "text": message.text,
        "calls": [(call["name"], call["args"]) for call in message.tool_calls],
        "usage": message.usage_metadata,
        "metadata": metadata,
        "explanation": explanation,
    }


def merged(chunks):
    """The messages that chunks are parts of; each is whole once."""
    messages = {}
    for chunk in answers(chunks):
        assert isinstance(chunk, AIMessageChunk)  # nothing comes whole as well
        messages.setdefault(chunk.id, []).append(chunk)
    for parts in messages.values():
        assert len([part for part in parts if part.usage_metadata]) == 1
        assert len([part for part in parts if "finish_reason" in part.response_metadata]) == 1
    return [reduce(add, parts) for parts in messages.values()]


def assert_whole(message):
    assert message.usage_metadata["output_tokens"] > 0
    assert message.usage_metadata["input_token_details"].keys() == {"cache_read", "cache_creation"}
    assert message.response_metadata["model_provider"] == "ragcache"
    assert message.id.startswith("chatcmpl-")
    assert all(call["id"].startswith("call_") for call in message.tool_calls)


def assert_same(streamed, whole, *, calls):
    """The answers of two runs are the same, and as many as the graph has model calls."""
    assert list(map(told, streamed)) == list(map(told, whole))
    assert len(whole) == calls
    for message in [*streamed, *whole]:
        assert_whole(message)
    assert len({call["id"] for each in streamed for call in each.tool_calls}) == calls - 1


def calls_of(make):
    return 2 if "agent" in make.__name__ else 1


async def collect(stream):
    return [item async for item in stream]


# One call.


@pytest.mark.parametrize("tools", [[], [weather]], ids=["text", "call"])
async def test_a_message_is_the_same_however_it_comes(cold, tools):
    def bound():
        return cold().bind_tools(tools)

    def streamed():
        return reduce(add, model.stream(messages))

    async def drawn():
        return reduce(add, await collect(model.astream(messages)))

    messages = ASK["messages"]
    model = bound()
    invoked = [model.invoke(messages) for _ in range(2)]
    model = bound()
    others = [[streamed() for _ in range(2)]]
    model = bound()
    others += [[await model.ainvoke(messages) for _ in range(2)]]
    model = bound()
    others += [[await drawn() for _ in range(2)]]
    assert [list(map(told, pair)) for pair in others] == [list(map(told, invoked))] * 3
    first, second = (message.usage_metadata["input_token_details"] for message in invoked)
    assert (first["cache_read"], second["cache_creation"]) == (0, 0)
    assert second["cache_read"] > 100
    assert invoked[0].response_metadata["ragcache"]["reason"] == "cold"


def test_the_chunks_of_a_message_have_its_id_and_the_last_one_its_usage(model):
    chunks = list(model.stream(QUESTION))
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 5
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.chunk_position for chunk in chunks][-2:] == [None, "last"]
    names = [chunk.response_metadata.get("model_name") for chunk in chunks]
    assert [name for name in names if name] == ["tiny"]


# Graphs.


@each_of(BLOCKING)
def test_tokens_of_a_graph(cold, script, make):
    whole = answers(make(cold()).invoke(ASK, LIMIT)["messages"])
    stream = make(cold()).stream(ASK, LIMIT, **TOKENS)
    streamed = merged(chunk for _, (chunk, _) in stream)
    assert_same(streamed, whole, calls=calls_of(make))
    assert streamed[-1].text == script.text


@each_of(ALL)
async def test_tokens_of_a_graph_in_asynchronous_runs(cold, script, make):
    whole = answers((await make(cold()).ainvoke(ASK, LIMIT))["messages"])
    stream = make(cold()).astream(ASK, LIMIT, **TOKENS)
    streamed = merged([chunk async for _, (chunk, _) in stream])
    assert_same(streamed, whole, calls=calls_of(make))
    assert streamed[-1].text == script.text


@each_of(BLOCKING)
def test_all_modes_at_once(cold, make):
    whole = answers(make(cold()).invoke(ASK, LIMIT)["messages"])
    modes = {mode: [] for mode in ("values", "updates", "messages", "custom")}
    stream = make(cold()).stream(ASK, LIMIT, stream_mode=list(modes), subgraphs=True)
    for namespace, mode, item in stream:
        if not namespace or mode in ("messages", "custom"):
            modes[mode].append(item)
    assert_same(merged(chunk for chunk, _ in modes["messages"]), whole, calls=calls_of(make))
    values = answers(modes["values"][-1]["messages"])
    assert_same(values, whole, calls=calls_of(make))
    nodes = [node for update in modes["updates"] for node in update.values()]
    updates = answers(message for node in nodes for message in node["messages"])
    assert [message.id for message in updates] == [message.id for message in values]
    assert modes["custom"] == ["looking at Oslo"] * (calls_of(make) - 1)


@each_of(ALL)
async def test_a_graph_that_does_not_show_those_inside_says_everything_once(model, script, make):
    stream = make(model).astream(ASK, LIMIT, stream_mode="messages")
    assert (
        "".join([message.text async for message, _ in stream if answers([message])]) == script.text
    )


@each_of(ALL)
async def test_events_of_a_graph(cold, script, make):
    whole = answers((await make(cold()).ainvoke(ASK, LIMIT))["messages"])
    events = await collect(make(cold()).astream_events(ASK, LIMIT, version="v2"))
    by_kind = {
        kind: [each["data"] for each in events if each["event"] == f"on_chat_model_{kind}"]
        for kind in ("stream", "end")
    }
    chunks = [each["chunk"] for each in by_kind["stream"]]
    assert_same(merged(chunks), whole, calls=calls_of(make))
    assert_same([each["output"] for each in by_kind["end"]], whole, calls=calls_of(make))


def test_protocol_events_of_a_model(cold, script):
    whole = cold().invoke(QUESTION)
    stream = cold().stream_events(QUESTION, version="v3")
    assert "".join(stream.text) == script.text
    assert stream.output.usage_metadata == whole.usage_metadata
    assert told(stream.output)["explanation"] == told(whole)["explanation"]


async def test_protocol_events_of_a_graph(cold, script):
    whole = answers((await agent(cold()).ainvoke(ASK, LIMIT))["messages"])
    run = await agent(cold()).astream_events(ASK, LIMIT, version="v3")
    texts = [part async for message in run.messages async for part in message.text]
    assert "".join(texts) == script.text
    output = answers((await run.output())["messages"])
    assert [each.usage_metadata for each in output] == [each.usage_metadata for each in whole]
