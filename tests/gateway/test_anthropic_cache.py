"""Cache markers, usage and diagnostics of /v1/messages."""

import json

import pytest

from ragcache.errors import InvalidRequest
from ragcache.gateway.anthropic.schema import MessagesRequest
from ragcache.gateway.bodies import parse
from ragcache.types import Breakpoint, Explanation, MissReason

PATH = "/v1/messages"
SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
PLAIN = {"name": "a", "input_schema": {"type": "object"}}


def text(value, marker=None):
    return {"type": "text", "text": value, "cache_control": marker}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def tool(name, marker=None):
    return {**PLAIN, "name": name, "cache_control": marker}


def request(*messages, **fields):
    body = {"model": "tiny", "max_tokens": 9, "messages": messages, **fields}
    return parse(MessagesRequest, json.dumps(body).encode()).request("msg_1", "")


def breakpoints(*messages, **fields):
    return request(*messages, **fields).prompt.breakpoints


def refusal(*messages, **fields):
    with pytest.raises(InvalidRequest) as caught:
        request(*messages, **fields)
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    return caught.value.param


def test_without_markers_there_are_no_breakpoints():
    assert breakpoints(user(text("hi"))) == ()


def test_a_marker_stands_behind_its_block():
    found = breakpoints(
        user(text("hello "), text("you", SHORT), text("?")),
        tools=[tool("a"), tool("b", LONG), tool("c")],
        system=[text("be "), text("brief", LONG), text("!")],
    )
    assert found == (
        Breakpoint(None, 2, "1h"),
        Breakpoint(0, 8, "1h"),
        Breakpoint(1, 9, "5m"),
    )


def test_every_kind_of_block_may_be_marked():
    chunks = [{"type": "text", "text": "x"}]
    document = {
        "type": "document",
        "source": {"type": "content", "content": chunks},
        "cache_control": SHORT,
    }
    found = {"type": "search_result", "source": "s", "title": "t", "content": chunks}
    call = {"type": "tool_use", "id": "c1", "name": "a", "input": {}, "cache_control": SHORT}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "42", "cache_control": SHORT}
    messages = [
        user(document, {**found, "cache_control": SHORT}, text("?")),
        {"role": "assistant", "content": [text("I look."), call]},
        user(result, text("go on")),
    ]
    conversation = request(*messages).prompt
    first = conversation.messages[0].content
    assert conversation.breakpoints == (
        Breakpoint(0, first.index("</document>\n") + len("</document>\n")),
        Breakpoint(0, len(first) - 1),
        Breakpoint(1, None),
        Breakpoint(2, 2),
    )


def test_blocks_inside_others_may_be_marked():
    call = {"type": "tool_use", "id": "c1", "name": "a", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("4", SHORT), text("2")]}
    source = {"type": "content", "content": [text("x", SHORT), text("y")]}
    document = {"type": "document", "source": source}
    found = breakpoints(
        user(text("hi")),
        {"role": "assistant", "content": [call]},
        user({**result, "is_error": True}, document),
    )
    assert found == (Breakpoint(2, len("Error: 4")), Breakpoint(3, len("<document>\nx")))


def test_markers_of_the_system_prompt_move_with_the_billing_line():
    line = "x-anthropic-billing-header: cch=1;"
    found = breakpoints(user(text("hi")), system=[text(line, SHORT), text("be brief", SHORT)])
    assert found == (Breakpoint(0, 8),)


def test_markers_never_change_the_prompt():
    def conversation(*markers):
        first, second, third = markers
        return request(
            user(text("hi ", second), text("you", third)),
            tools=[tool("a", first)],
            system=[text("be brief", first)],
        ).prompt

    plain = conversation(None, None, None)
    for markers in [(SHORT, None, None), (None, SHORT, SHORT), (LONG, LONG, SHORT)]:
        marked = conversation(*markers)
        assert (marked.messages, marked.tools) == (plain.messages, plain.tools)
        assert marked.breakpoints


def test_the_marker_of_the_request_goes_to_its_last_block():
    blocks = [text("hi"), text("you")]
    assert breakpoints(user(*blocks), cache_control=LONG) == (Breakpoint(0, 5, "1h", "top_level"),)


def test_the_marker_of_the_request_walks_back_to_a_block_that_can_carry_it():
    thoughts = {"type": "thinking", "thinking": "hm", "signature": "x"}
    messages = [user(text("hi")), {"role": "assistant", "content": [thoughts]}, user(text(""))]
    assert breakpoints(*messages, cache_control=SHORT) == (Breakpoint(0, 2, "5m", "top_level"),)
    assert breakpoints(user(text("")), tools=[PLAIN], cache_control=SHORT) == (
        Breakpoint(None, 1, "5m", "top_level"),
    )
    assert breakpoints(user(text("")), cache_control=SHORT) == ()


def test_the_marker_of_the_request_adds_nothing_to_an_equal_one():
    marked = user(text("hi"), text("you", SHORT))
    assert breakpoints(marked, cache_control=SHORT) == (Breakpoint(0, 5, "5m"),)
    assert refusal(marked, cache_control=LONG) == "cache_control"


def test_at_most_four_blocks_are_marked():
    four = [text("a", SHORT)] * 4
    assert len(breakpoints(user(*four))) == 4
    assert refusal(user(*four, text("a", SHORT))) == "messages[0].content[4].cache_control"
    assert len(breakpoints(user(*four[:3], text("b")), cache_control=SHORT)) == 4
    assert refusal(user(*four, text("b")), cache_control=SHORT) == "cache_control"
    assert len(breakpoints(user(*four), cache_control=SHORT)) == 4


def test_longer_ttls_come_first():
    turn = user(text("a", LONG), text("b", SHORT))
    assert [place.ttl for place in breakpoints(turn, system=[text("s", LONG)])] == [
        "1h",
        "1h",
        "5m",
    ]
    assert refusal(turn, system=[text("s", SHORT)]) == "messages[0].content[0].cache_control.ttl"
    late = user(text("a", SHORT), text("b", LONG))
    assert refusal(late) == "messages[0].content[1].cache_control.ttl"
    assert refusal(user(text("a")), tools=[tool("a", SHORT)], system=[text("s", LONG)]) == (
        "system[0].cache_control.ttl"
    )
    assert refusal(user(text("a", SHORT), text("b")), cache_control=LONG) == "cache_control.ttl"
    breakpoints(user(text("a", LONG), text("b")), cache_control=SHORT)


@pytest.mark.parametrize(
    ("marker", "field"),
    [
        ({"type": "permanent"}, ".type"),
        ({}, ".type"),
        ({"type": "ephemeral", "ttl": "2h"}, ".ttl"),
        ({"type": "ephemeral", "ttl": 300}, ".ttl"),
        ("ephemeral", ""),
    ],
)
def test_a_malformed_marker_is_refused_wherever_it_stands(marker, field):
    hi = user(text("hi"))
    path = "messages[0].content[0].cache_control"
    assert refusal(user(text("hi", marker))) == path + field
    assert refusal(hi, system=[text("s", marker)]) == "system[0].cache_control" + field
    assert refusal(hi, tools=[tool("a", marker)]) == "tools[0].cache_control" + field
    assert refusal(hi, cache_control=marker) == "cache_control" + field


def test_empty_text_and_thoughts_cannot_be_marked():
    thoughts = {"type": "thinking", "thinking": "hm", "signature": "x", "cache_control": SHORT}
    turn = {"role": "assistant", "content": [thoughts]}
    assert refusal(user(text("a"), text("", SHORT))) == "messages[0].content[1].cache_control"
    assert refusal(turn, user(text("a"))) == "messages[0].content[0].cache_control"


@pytest.mark.parametrize(
    ("cached", "written", "expected"),
    [
        (0, {}, (5, 0, 0, 0, 0)),
        (2, {}, (3, 2, 0, 0, 0)),
        (0, {"5m": 3}, (2, 0, 3, 3, 0)),
        (1, {"5m": 1, "1h": 2}, (1, 1, 3, 1, 2)),
    ],
)
async def test_usage_has_three_parts_that_sum_up_to_the_prompt(
    http, serving, cached, written, expected
):
    serving.script.cached_tokens, serving.script.written = cached, written
    body = {"model": "tiny", "max_tokens": 9, "messages": [user(text("say hello to me"))]}
    async with http.post(PATH, json=body) as response:
        usage = (await response.json())["usage"]
    split = usage["cache_creation"]
    assert expected == (
        usage["input_tokens"],
        usage["cache_read_input_tokens"],
        usage["cache_creation_input_tokens"],
        split["ephemeral_5m_input_tokens"],
        split["ephemeral_1h_input_tokens"],
    )
    assert sum(expected[:3]) == 5
    async with http.post(PATH, json={**body, "stream": True}) as response:
        lines = (await response.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert events[0]["message"]["usage"] == {**usage, "output_tokens": 0}
    assert events[-2]["usage"] == usage


def explanation(reason=None, segment=None, previous="msg_0"):
    return Explanation(50, 20, reason, 30, segment=segment, previous=previous)


CHANGED = MissReason.CHANGED


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (explanation(CHANGED, "tools"), "tools_changed"),
        (explanation(CHANGED, "system"), "system_changed"),
        (explanation(CHANGED, "messages.3"), "messages_changed"),
        (explanation(CHANGED), "unavailable"),
        (explanation(MissReason.EVICTED), "unavailable"),
        (explanation(MissReason.COLD), "unavailable"),
        (explanation(CHANGED, "tools", "msg_9"), "previous_message_not_found"),
        (explanation(MissReason.COLD, previous=None), "previous_message_not_found"),
        (explanation(), None),
    ],
)
async def test_diagnostics_say_what_changed(anthropic, serving, found, expected, streamed):
    serving.script.explanation = found
    options = {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [user(text("hi"))],
        "diagnostics": {"previous_message_id": "msg_0"},
    }
    if streamed:
        async with anthropic.messages.stream(**options) as stream:
            answer = await stream.get_final_message()
    else:
        answer = await anthropic.messages.create(**options)
    assert serving.generations[0].request.previous_id == "msg_0"
    if expected is None:
        assert answer.diagnostics is None
        return
    reason = answer.diagnostics.cache_miss_reason
    assert reason.type == expected
    if expected.endswith("_changed"):
        assert reason.cache_missed_input_tokens == 30


@pytest.mark.parametrize(
    ("asked", "found", "expected"),
    [
        (None, explanation(CHANGED, "tools"), None),
        ({"previous_message_id": None}, explanation(CHANGED, "tools"), None),
        ({"previous_message_id": "msg_0"}, None, {"cache_miss_reason": None}),
    ],
)
async def test_diagnostics_say_nothing_that_was_not_asked_or_is_not_known(
    http, serving, asked, found, expected
):
    serving.script.explanation = found
    body = {"model": "tiny", "max_tokens": 9, "messages": [user(text("hi"))]}
    async with http.post(PATH, json={**body, "diagnostics": asked}) as response:
        assert (await response.json())["diagnostics"] == expected


@pytest.mark.parametrize("found", [None, explanation(CHANGED, "system")])
async def test_an_explanation_comes_with_the_answer_when_asked_for(http, serving, found):
    serving.script.explanation = found
    body = {"model": "tiny", "max_tokens": 9, "messages": [user(text("hi"))]}
    async with http.post(PATH, json={**body, "ragcache": {"explain": True}}) as response:
        told = (await response.json())["ragcache"]
    if found is None:
        assert told is None
    else:
        assert (told["segment"], told["lost_tokens"], told["block_size"]) == ("system", 30, 4)
    async with http.post(PATH, json=body) as response:
        assert "ragcache" not in await response.json()
