"""What becomes of the messages of a chat."""

import pytest

USER = {"role": "user", "content": "say hello to me"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "c1"}


@pytest.fixture
def rendered(client, serving):
    """The messages that reach the serving."""

    async def rendered(*messages):
        await client.chat.completions.create(model="tiny", messages=messages)
        return serving.generations[-1].request.prompt.messages

    return rendered


async def test_every_role_arrives_in_its_place(rendered):
    history = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": "be kind"},
        {**USER, "name": "ada"},
        {"role": "assistant", "content": "looking", "tool_calls": [CALL]},
        RESULT,
        {"role": "function", "name": "g", "content": "43"},
    ]
    messages = await rendered(*history)
    assert [message.role for message in messages] == [message["role"] for message in history]
    assert messages[2].name == "ada"
    assert (messages[3].content, messages[3].tool_calls) == ("looking", (CALL,))
    assert (messages[4].content, messages[4].tool_call_id) == ("42", "c1")
    assert messages[5].name == "g"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_a_list_of_text_parts_is_the_same_message_as_a_string(rendered, role):
    parts = [{"type": "text", "text": text} for text in ("say hello", "", " to me")]
    extra = {"tool_call_id": "c1"} if role == "tool" else {}
    as_string = await rendered(USER, {"role": role, "content": "say hello to me", **extra})
    as_parts = await rendered(USER, {"role": role, "content": parts, **extra})
    assert as_parts == as_string


async def test_calls_without_content_are_the_same_however_that_is_written(rendered):
    turn = {"role": "assistant", "tool_calls": [CALL]}
    ways = [turn, {**turn, "content": None}, {**turn, "content": ""}, {**turn, "content": []}]
    messages = [await rendered(USER, way, RESULT) for way in ways]
    assert all(way == messages[0] for way in messages)
    assert messages[0][1].content == ""


async def test_an_assistants_refusal_is_what_it_said(rendered):
    part = {"type": "refusal", "refusal": "I cannot"}
    in_parts = await rendered(USER, {"role": "assistant", "content": [part]})
    in_field = await rendered(USER, {"role": "assistant", "content": None, "refusal": "I cannot"})
    assert in_parts == in_field
    assert in_parts[1].content == "I cannot"


async def test_an_answer_can_be_sent_back_as_it_came(client, serving, rendered):
    answer = await client.chat.completions.create(model="tiny", messages=[USER])
    messages = await rendered(USER, answer.choices[0].message.model_dump(), USER)
    assert messages[1].content == "Hello, wörld 🌍!"


@pytest.mark.parametrize("arguments", ['{"x": 1}', "", "{x", {"x": 1}])
async def test_arguments_are_text_or_an_object(rendered, arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = await rendered(USER, {"role": "assistant", "tool_calls": [call]}, RESULT)
    assert messages[1].tool_calls[0]["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"id": None}, "id"),
        ({"id": ""}, "id"),
        ({"type": "custom"}, "type"),
        ({"function": None}, "function"),
        ({"function": {"arguments": "{}"}}, "function.name"),
        ({"function": {"name": "f", "arguments": 5}}, "function.arguments"),
        ({"function": {"name": "f", "arguments": [1]}}, "function.arguments"),
    ],
)
async def test_a_malformed_call_is_named(http, change, param):
    turn = {"role": "assistant", "tool_calls": [CALL, {**CALL, **change}]}
    body = {"model": "tiny", "messages": [USER, turn, RESULT]}
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == f"messages[1].tool_calls[1].{param}"
