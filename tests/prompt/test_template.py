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


@pytest.mark.parametrize(
    ("name", "supported"),
    [("chatml", False), ("hermes", True), ("llama3", True), ("last_tools", True), ("none", False)],
)
def test_tools_are_refused_where_they_would_be_dropped(
    name: str, supported: bool, template: Any, chat: Chat, tools: Any
) -> None:
    assert template(name).supports_tools is supported
    if not supported and name != "none":
        assert refusal(template(name), chat("a", tools=tools)).param == "tools"


def test_tool_calls_are_refused_where_they_would_be_dropped(template: Any, chat: Chat) -> None:
    call = Message("assistant", "", tool_calls=(CALL,))
    assert refusal(template("chatml"), chat("a", call)).param == "messages[1].tool_calls"


def test_a_template_for_tools_only_counts_as_support(
    build: Any, chat: Chat, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build("byte_level", "chatml")
    both = {"default": tokenizer.chat_template, "tool_use": "{{ tools | tojson }}"}
    monkeypatch.setattr(tokenizer, "chat_template", both)
    template = ChatTemplate(tokenizer)
    assert render(template, chat("a", tools=tools)) == json.dumps(list(tools))
    assert "<|im_start|>user" in render(template, chat("a"))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (ChatPrompt((Message("user", "a"), Message("user", "b\ud83d"))), "messages[1].content"),
        (ChatPrompt((Message("user", "a", name="\ud83d"),)), "messages[0].name"),
        (ChatPrompt((Message("user", "a"),), ({"f": {"d": ["\ud83d"]}},)), "tools[0].f.d[0]"),
        (ChatPrompt((Message("user", "a"),), (), {"x": "\ud83d"}), "chat_template_kwargs.x"),
    ],
)
def test_a_lone_surrogate_is_refused_by_name(prompt: ChatPrompt, param: str, template: Any) -> None:
    assert refusal(template("hermes"), prompt).param == param


def test_nesting_without_end_is_refused(template: Any, chat: Chat) -> None:
    tool: dict[str, Any] = {}
    for _ in range(10_000):
        tool = {"a": tool}
    assert "nested" in refusal(template("hermes"), chat("a", tools=[tool])).message


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
