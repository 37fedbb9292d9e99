from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

from ragcache.errors import InvalidRequest
from ragcache.prompt.template import ChatTemplate
from ragcache.types import ChatPrompt, Message

Chat = Callable[..., ChatPrompt]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'},
}


def render(template: ChatTemplate, prompt: ChatPrompt) -> str:
    return template.render(template.prepare(prompt))


def refusal(template: ChatTemplate, prompt: ChatPrompt) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        render(template, prompt)
    return error.value


@pytest.fixture(scope="session")
def template(build: Any) -> Callable[[str], ChatTemplate]:
    return lambda name: ChatTemplate(build("byte_level", name))


def test_a_conversation_renders_as_transformers_renders_it(
    smollm2: Any, build: Any, chat: Chat, tools: Any
) -> None:
    prompt = chat("hi", "hello", "1 < 2?")
    dicts = [{"role": m.role, "content": m.content} for m in prompt.messages]
    for tokenizer in (smollm2, *(build("byte_level", n) for n in ("chatml", "hermes", "llama3"))):
        expected = tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True)
        assert render(ChatTemplate(tokenizer), prompt) == expected
    tokenizer = build("byte_level", "llama3")
    assert render(ChatTemplate(tokenizer), chat("hi", tools=tools)) == (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}],
            tools=list(tools),
            tokenize=False,
            add_generation_prompt=True,
        )
    )


def test_arguments_of_calls_reach_the_template_as_objects_in_their_order(
    template: Any, chat: Chat
) -> None:
    call = Message("assistant", "", tool_calls=(CALL,))
    rendered = render(template("hermes"), chat("x", call))
    assert '<tool_call>{"name": "f", "arguments": {"b": 1, "a": 2}}</tool_call>' in rendered


@pytest.mark.parametrize(("arguments", "shown"), [("", "{}"), ('{"a": tru', '"{\\"a\\": tru"')])
def test_arguments_that_are_no_json_are_kept(
    arguments: str, shown: str, template: Any, chat: Chat
) -> None:
    function = {"name": "f", "arguments": arguments}
    call = Message("assistant", "", tool_calls=({**CALL, "function": function},))
    assert f'"arguments": {shown}}}' in render(template("hermes"), chat("x", call))


def test_the_developer_role_is_system_where_the_template_does_not_know_it(
    template: Any, build: Any, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = chat(Message("developer", "be brief"), "hi")
    assert "<|im_start|>system\nbe brief" in render(template("chatml"), prompt)
    tokenizer = build("byte_level", "chatml")
    monkeypatch.setattr(tokenizer, "chat_template", "{# developer #}" + tokenizer.chat_template)
    assert "<|im_start|>developer\nbe brief" in render(ChatTemplate(tokenizer), prompt)


def test_what_the_template_raises_is_the_clients_error(template: Any, chat: Chat) -> None:
    error = refusal(template("llama2"), chat("a", Message("user", "b")))
    assert error.param == "messages"
    assert "roles must alternate" in error.message


def test_a_python_error_in_the_template_is_the_clients_error(
    build: Any, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build("byte_level", "chatml")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ 1 + messages[0].content }}")
    assert refusal(ChatTemplate(tokenizer), chat("a")).param == "messages"


def test_no_template_and_no_messages_are_refused(template: Any, chat: Chat) -> None:
    assert "no chat template" in refusal(template("none"), chat("a")).message
    assert refusal(template("chatml"), chat()).param == "messages"


@pytest.mark.parametrize("name", ["hermes", "llama3", "last_tools"])
def test_a_template_that_knows_tools_renders_them_itself(
    name: str, template: Any, build: Any, chat: Chat, tools: Any
) -> None:
    conversation = chat("a", Message("assistant", "", tool_calls=(CALL,)), tools=tools)
    dicts = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": 2}}}],
        },
    ]
    assert render(template(name), conversation) == build("byte_level", name).apply_chat_template(
        dicts, tools=list(tools), tokenize=False, add_generation_prompt=True
    )


def test_markers_and_strictness_of_tools_change_no_token(
    template: Any, chat: Chat, tools: Any
) -> None:
    marker = {"cache_control": {"type": "ephemeral"}}
    function = {"strict": True, **tools[0]["function"], **marker}
    marked = {**marker, "type": "function", "defer": 1, "function": function}
    for name in ("hermes", "llama3", "chatml"):
        plain, other = (
            render(template(name), chat("a", tools=given)) for given in (tools, [marked])
        )
        assert plain == other
        assert "Search the documents" in plain


def test_the_old_role_of_results_is_the_new_one(template: Any, chat: Chat) -> None:
    for name in ("hermes", "chatml", "llama3"):
        function, tool = (
            render(template(name), chat("a", "b", Message(role, "c")))
            for role in ("function", "tool")
        )
        assert function == tool


@pytest.mark.parametrize(
    ("ids", "results", "refused"),
    [
        (["1", "2"], ["2", "1"], None),
        (["1"], ["2"], 2),
        (["1"], ["1", "1"], 3),
        (["1"], [None], None),
        (["1", "2"], [None, "2"], None),
        (["1", "2"], ["1"], 1),
        (["1", "2"], [None], 1),
        ([], ["1"], None),
    ],
)
def test_a_result_needs_a_call_that_waits_for_it(
    ids: list[str], results: list[str], refused: int | None, template: Any, chat: Chat
) -> None:
    calls = tuple({**CALL, "id": id} for id in ids)
    answers = [Message("tool", "c", tool_call_id=id) for id in results]
    prompt = chat("a", Message("assistant", "", tool_calls=calls), *answers)
    if refused is None:
        render(template("chatml"), prompt)
    elif refused == 1:
        assert refusal(template("chatml"), prompt).param == "messages[1].tool_calls"
    else:
        assert refusal(template("chatml"), prompt).param == f"messages[{refused}].tool_call_id"


def test_the_assistant_goes_on_when_all_its_calls_have_results(template: Any, chat: Chat) -> None:
    call = Message("assistant", "", tool_calls=(CALL,))
    for turns in ([call, "b"], [call, call], [call, Message("assistant", "c"), "d"]):
        error = refusal(template("chatml"), chat("a", *turns))
        assert (error.param, "'call_1'" in error.message) == ("messages[1].tool_calls", True)
    render(template("chatml"), chat("a", call))  # nothing is to follow yet


def test_ids_may_be_used_again_and_results_outlive_calls_that_were_cut_off(
    template: Any, chat: Chat
) -> None:
    call = Message("assistant", "", tool_calls=(CALL,))
    result = Message("tool", "c", tool_call_id="call_1")
    for turns in ([call, result, call, result], [result, "b", call, result]):
        render(template("chatml"), chat("a", *turns))


def test_a_template_for_tools_only_counts_as_support(
    build: Any, chat: Chat, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build("byte_level", "chatml")
    with_calls = "{{ messages[1].tool_calls[0] if messages[1] and messages[1].tool_calls }}"
    both = {
        "default": "{# [TOOL_CALLS] #}" + with_calls,
        "tool_use": "{{ tools | tojson }}" + with_calls,
    }
    monkeypatch.setattr(tokenizer, "chat_template", both)
    template = ChatTemplate(tokenizer)
    assert render(template, chat("a", tools=tools)) == json.dumps(list(tools))
    assert render(template, chat("a")) == ""


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (ChatPrompt((Message("user", "a"), Message("user", "b\ud83d"))), "messages[1].content"),
        (ChatPrompt((Message("user", "a", name="\ud83d"),)), "messages[0].name"),
        (
            ChatPrompt((Message("user", "a"),), ({"function": {"parameters": ["\ud83d"]}},)),
            "tools[0].function.parameters[0]",
        ),
        (ChatPrompt((Message("user", "a"),), (), {"x": "\ud83d"}), "chat_template_kwargs.x"),
    ],
)
def test_a_lone_surrogate_is_refused_by_name(prompt: ChatPrompt, param: str, template: Any) -> None:
    assert refusal(template("hermes"), prompt).param == param


def test_nesting_without_end_is_refused(template: Any, chat: Chat) -> None:
    tool: dict[str, Any] = {}
    for _ in range(10_000):
        tool = {"a": tool}
    tools = [{"type": "function", "function": {"name": "f", "parameters": tool}}]
    assert "nested" in refusal(template("hermes"), chat("a", tools=tools)).message


def test_options_reach_the_template_but_cannot_replace_the_conversation(
    template: Any, build: Any, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build("byte_level", "chatml")
    source = "{{ 'quiet' if not enable_thinking else 'loud' }}"
    monkeypatch.setattr(tokenizer, "chat_template", source)
    assert render(ChatTemplate(tokenizer), chat("a", enable_thinking=True)) == "loud"
    assert render(ChatTemplate(tokenizer), chat("a", enable_thinking=False)) == "quiet"
    error = refusal(template("chatml"), chat("a", messages=[]))
    assert error.param == "chat_template_kwargs"


def test_a_template_with_a_clock_sees_the_day_only_and_is_announced(
    build: Any, chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = build("byte_level", "clock")
    days = [date(2024, 2, 29)]
    with caplog.at_level(logging.WARNING):
        template = ChatTemplate(tokenizer, today=lambda: days[-1])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    first = render(template, chat("a"))
    assert first.startswith("29 Feb 2024 00:00:00\n")
    assert render(template, chat("a")) == first
    days.append(date(2024, 3, 1))
    assert render(template, chat("a")).startswith("01 Mar 2024")


def test_a_template_without_a_clock_is_not_announced(
    build: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ChatTemplate(build("byte_level", "chatml"))
    assert not caplog.records
