"""Tools over the whole gateway: what is a call and what is text, and what it costs the cache."""

import json
import random

import pytest
from openai import LengthFinishReasonError

from ragcache.bench.prose import prose

BLOCK = 16
STREAMS = pytest.mark.parametrize("stream", [False, True])
SYSTEM = prose(random.Random(1), 60)
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
FUNCTIONS = [
    {"name": name, "description": prose(random.Random(name), 15), "parameters": SCHEMA}
    for name in ("save", "send", "shout")
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
THEIRS = [{"input_schema": SCHEMA, **{k: f[k] for k in ("name", "description")}} for f in FUNCTIONS]
NAMED = {"type": "function", "function": {"name": "send"}}
ONE_OF = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
ODD = ['see </tool_call> "here"', "}{ ]\\ \n\t[{", "Łódź 🌍 {}", "echo '}' && {"]


def whole(tokens):
    return tokens // BLOCK * BLOCK


def calls_text(*texts):
    """What the model writes to call a tool once for each text."""
    calls = [{"name": "save", "arguments": {"text": text}} for text in texts]
    return f"<tool_call>{json.dumps(calls, ensure_ascii=False)}</tool_call>"


def user(content):
    return {"role": "user", "content": content}


@pytest.fixture
def chat(gateway):
    """The choice of an answer in a chat with tools, and the usage where it is no stream."""

    def chat(*messages, stream=False, **options):
        system = {"role": "system", "content": SYSTEM}
        body = {
            "model": "tiny",
            "max_tokens": 120,
            "messages": [system, *(messages or [user("hi")])],
            "tools": TOOLS,
            **options,
        }
        if not stream:
            answer = gateway.openai.chat.completions.create(**body)
            return answer.choices[0], answer.usage
        with gateway.openai.chat.completions.stream(**body) as events:
            try:
                return events.get_final_completion().choices[0], None
            except LengthFinishReasonError as error:
                return error.completion.choices[0], None

    return chat


@pytest.fixture
def message(gateway):
    """An answer of Anthropic's route to a prompt with tools."""

    def message(*messages, stream=False, **options):
        body = {
            "model": "tiny",
            "max_tokens": 120,
            "system": SYSTEM,
            "messages": messages or [user("hi")],
            "tools": THEIRS,
            **options,
        }
        if not stream:
            return gateway.anthropic.messages.create(**body)
        with gateway.anthropic.messages.stream(**body) as events:
            return events.get_final_message()

    return message


def arguments(choice):
    return [json.loads(call.function.arguments) for call in choice.message.tool_calls or []]


@pytest.mark.parametrize("choice", ["none", "required", NAMED, ONE_OF])
def test_a_choice_of_tools_keeps_the_prompt(chat, choice):
    _, cold = chat()
    _, usage = chat(tool_choice=choice)
    assert usage.prompt_tokens == cold.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == whole(cold.prompt_tokens - 1)


def test_a_tool_that_is_gone_ends_the_hit_before_it(chat):
    chat()
    (_, last), (_, first) = chat(tools=TOOLS[:2]), chat(tools=TOOLS[1:])
    assert 0 < first.prompt_tokens_details.cached_tokens < 100
    assert last.prompt_tokens_details.cached_tokens > 100


@STREAMS
def test_json_in_an_answer_is_text(gateway, chat, message, stream):
    gateway.script.text = 'Use {"name": "save", "arguments": {}} in your <tool_call>.'
    choice, _ = chat(stream=stream)
    assert (choice.message.content, choice.finish_reason) == (gateway.script.text, "stop")
    assert not choice.message.tool_calls
    answer = message(stream=stream)
    assert [block.text for block in answer.content] == [gateway.script.text]
    assert answer.stop_reason == "end_turn"


@STREAMS
def test_text_before_a_call_is_kept_and_no_markup_shown(gateway, chat, message, stream):
    gateway.script.text = f"Let me see.{calls_text('a')}"
    choice, _ = chat(stream=stream)
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert arguments(choice) == [{"text": "a"}]
    text, call = message(stream=stream).content
    assert (text.text, call.name, call.input) == ("Let me see.", "save", {"text": "a"})


@STREAMS
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_any_argument_survives(gateway, chat, message, stream, choice):
    gateway.script.text = calls_text(*ODD)
    expected = [{"text": text} for text in ODD]
    answer, _ = chat(stream=stream, tool_choice=choice)
    assert arguments(answer) == expected
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
    assert len({call.id for call in answer.message.tool_calls}) == len(ODD)
    answer = message(stream=stream, tool_choice={"type": choice.replace("required", "any")})
    assert [block.input for block in answer.content] == expected
    assert answer.stop_reason == "tool_use"


def test_pieces_of_calls_are_numbered_and_join_to_json(gateway):
    gateway.script.text = calls_text(*ODD)
    body = {"model": "tiny", "max_tokens": 120, "messages": [user("hi")], "tools": TOOLS}
    chunks = gateway.events("/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    for number, text in enumerate(ODD):
        first, *rest = [piece for piece in pieces if piece["index"] == number]
        assert first["type"] == "function"
        assert first["id"] not in ("", "null", None)
        assert first["function"] == {"name": "save", "arguments": ""}
        assert all(piece.keys() == {"index", "function"} for piece in rest)
        joined = "".join(piece["function"]["arguments"] for piece in rest)
        assert json.loads(joined) == {"text": text}
    assert not any(delta.get("content") for delta in deltas)


@STREAMS
def test_a_call_that_is_cut_off_is_no_call(gateway, chat, message, stream):
    gateway.script.text = calls_text("a long text that is not finished")
    for limit in (2, 20):
        choice, _ = chat(stream=stream, tool_choice="required", max_tokens=limit)
        assert choice.finish_reason == "length"
        assert not choice.message.tool_calls
        answer = message(stream=stream, tool_choice={"type": "any"}, max_tokens=limit)
        assert answer.stop_reason == "max_tokens"
        assert not [block for block in answer.content if block.type == "tool_use"]


@STREAMS
def test_a_required_call_is_made_although_the_model_would_say_something_else(chat, message, stream):
    for wanted in ("required", NAMED):
        choice, _ = chat(stream=stream, tool_choice=wanted)
        assert choice.finish_reason == "tool_calls"
        assert arguments(choice)
    assert [call.function.name for call in choice.message.tool_calls] == ["send"]
    answer = message(stream=stream, tool_choice={"type": "tool", "name": "send"})
    assert [block.name for block in answer.content] == ["send"]
    assert answer.stop_reason == "tool_use"


@STREAMS
def test_one_call_at_a_time_is_one(gateway, chat, message, stream):
    gateway.script.text = calls_text("a", "b")
    assert len(arguments(chat(stream=stream)[0])) == 2
    assert len(arguments(chat(stream=stream, parallel_tool_calls=False)[0])) == 1
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(message(stream=stream).content) == 2
    assert len(message(stream=stream, tool_choice=choice).content) == 1


MADE = {"type": "function", "function": {"name": "save", "arguments": '{"text": "a"}'}}
IDS = ("c1", "c2")


def called(**content):
    return {"role": "assistant", "tool_calls": [{"id": i} | MADE for i in IDS], **content}


def results(content):
    return [{"role": "tool", "tool_call_id": i, "content": content} for i in IDS]


def test_calls_need_no_content(chat):
    def total(call):
        return chat(user("hi"), call, *results("ok"))[1].prompt_tokens

    without = {total(called()), total(called(content=None)), total(called(content=""))}
    assert len(without) == 1
    assert total(called(content="Well,")) > max(without)


def test_results_may_be_lists_errors_and_followed_by_text(gateway, message):
    uses = [{"type": "tool_use", "id": i, "name": "save", "input": {"text": "a"}} for i in "ab"]
    texts = [{"type": "text", "text": prose(random.Random(seed), 12)} for seed in range(4)]
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "full", "is_error": True}
    found = {"type": "tool_result", "tool_use_id": "b", "content": texts[:2]}
    turns = [user("hi"), {"role": "assistant", "content": uses}]

    def total(*content):
        usage = message(*turns, user(list(content))).usage
        return usage.input_tokens + usage.cache_read_input_tokens

    both = total(failed, found)
    assert total(failed, found | {"content": texts[:1]}) < both
    assert total(failed | {"is_error": False}, found) < both < total(failed, found, texts[2])
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    unknown = {"type": "tool_result", "tool_use_id": "c", "content": "?"}
    for block in (image, unknown):
        messages = [*turns, user([failed, found, block])]
        body = {"model": "tiny", "max_tokens": 9, "messages": messages}
        refused = gateway.http.post("/v1/messages", json=body)
        assert refused.status_code == 400
        assert "messages[2].content[2]" in refused.json()["error"]["message"]


def test_tags_in_a_result_make_no_call(gateway, chat):
    choice, _ = chat(user("hi"), called(), *results(calls_text("x")))
    assert not choice.message.tool_calls
    assert choice.message.content == gateway.script.text


@pytest.mark.parametrize("role", ["developer", "system"])
def test_instructions_in_the_middle_keep_what_lies_before_them(chat, message, role):
    turns = [user(prose(random.Random(9), 40)), {"role": "assistant", "content": "yes"}]
    instruction = {"role": role, "content": prose(random.Random(10), 20)}
    _, before = chat(*turns, user("go on"))
    _, after = chat(*turns, instruction, user("go on"))
    assert after.prompt_tokens > before.prompt_tokens + 20
    assert after.prompt_tokens_details.cached_tokens >= before.prompt_tokens - 2 * BLOCK
    if role == "system":  # the other wire has no developers
        usage = message(*turns, user("go on"), instruction).usage
        assert usage.cache_read_input_tokens >= before.prompt_tokens - BLOCK
