"""Whatever the deltas are, a stream says what a whole answer says."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ragcache.gateway.openai.format import ChatReply, Choice, TextReply
from ragcache.types import Delta, FinishReason, TextLogprob, ToolCall, Usage

REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CONTEXT])
CALLS = st.builds(ToolCall, st.text(min_size=1, max_size=3), st.text(max_size=5))
LOGPROBS = st.builds(TextLogprob, st.text(max_size=3), st.binary(max_size=3), st.floats(-9, 0))


@st.composite
def generations(draw, max_calls=0):
    """Deltas of up to three choices, interleaved, each choice ending once."""
    choices = draw(st.integers(1, 3))
    left = {index: draw(st.integers(0, 4)) for index in range(choices)}
    deltas = []
    while left:
        index = draw(st.sampled_from(sorted(left)))
        text = draw(st.text(max_size=3))
        logprobs = tuple(draw(st.lists(LOGPROBS, max_size=2)))
        called = tuple(draw(st.lists(CALLS, max_size=max_calls)))
        ends = left[index] == 0
        deltas.append(Delta(index, text, logprobs, draw(REASONS) if ends else None, called))
        left[index] -= 1
        if ends:
            del left[index]
    return choices, deltas


def whole(reply, choices, deltas):
    collected = [Choice(index) for index in range(choices)]
    for delta in deltas:
        collected[delta.index].add(delta)
    return reply.body(collected, Usage(1, 0, 1))["choices"]


def streamed(reply, deltas):
    own = defaultdict(list)
    for delta in deltas:
        for chunk in reply.chunks(delta):
            (choice,) = chunk["choices"]
            own[choice["index"]].append(choice)
    return own


def joined_calls(choices):
    """The functions of streamed calls, put together as clients do."""
    calls = {}
    for choice in choices:
        for part in choice["delta"].get("tool_calls", []):
            call = calls.setdefault(part["index"], {"arguments": ""})
            call["name"] = part["function"].get("name", call.get("name"))
            call["arguments"] += part["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return list(calls.values())


@given(generations(max_calls=2))
def test_chat(generation):
    choices, deltas = generation
    own = streamed(ChatReply("m", include_usage=False), deltas)
    for answer in whole(ChatReply("m", include_usage=False), choices, deltas):
        first, *rest, last = own[answer["index"]]
        message = answer["message"]
        assert first["delta"]["role"] == "assistant"
        assert not first["delta"]["content"]
        assert (last["delta"], last["finish_reason"]) == ({}, answer["finish_reason"])
        assert all(choice["finish_reason"] is None for choice in (first, *rest))
        text = "".join(c["delta"].get("content", "") for c in rest)
        assert text == (message["content"] or "")
        assert joined_calls(rest) == [call["function"] for call in message.get("tool_calls", [])]
        entries = [e for c in rest if c["logprobs"] for e in c["logprobs"]["content"]]
        assert entries == (answer["logprobs"] or {"content": []})["content"]


@given(generations())
def test_text(generation):
    choices, deltas = generation
    own = streamed(TextReply("m", include_usage=False), deltas)
    for answer in whole(TextReply("m", include_usage=False), choices, deltas):
        *rest, last = own[answer["index"]]
        assert (last["text"], last["finish_reason"]) == ("", answer["finish_reason"])
        assert all(choice["finish_reason"] is None for choice in rest)
        assert "".join(choice["text"] for choice in rest) == answer["text"]
        parts = [choice["logprobs"] for choice in rest if choice["logprobs"]]
        for name, entries in (answer["logprobs"] or {}).items():
            assert [entry for part in parts for entry in part[name]] == entries
