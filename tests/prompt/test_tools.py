from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.prompt.calls import CallParser
from ragcache.prompt.template import ChatTemplate
from ragcache.prompt.tokenize import PromptTokenizer
from ragcache.types import ChatPrompt, Message

Chat = Callable[..., ChatPrompt]


def call(name: str, arguments: str, id: str = "1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str, *calls: dict[str, Any]) -> Message:
    return Message("assistant", content, tool_calls=calls)


@pytest.fixture(scope="session")
def render(smollm2: Any) -> Callable[[ChatPrompt], str]:
    """Render for SmolLM2, whose template has neither tools nor calls."""
    template = ChatTemplate(smollm2)
    return lambda prompt: template.control.unmark(template.render(template.prepare(prompt)))


def test_definitions_come_first_in_the_system_message(render: Any, chat: Chat, tools: Any) -> None:
    text = render(chat(Message("system", "be brief"), Message("user", "hi"), tools=tools * 2))
    line = json.dumps(tools[0])
    assert text.startswith("<|im_start|>system\nYou can call")
    assert f"\n<tools>\n{line}\n{line}\n</tools>\n" in text
    assert text.endswith(
        "plain text.\n\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.count("<|im_start|>system") == 1


def test_tools_need_no_system_message_and_leave_no_default_one(
    render: Any, chat: Chat, tools: Any
) -> None:
    assert "named SmolLM" in render(chat("hi"))
    text = render(chat("hi", tools=tools))
    assert "named SmolLM" not in text
    assert text.endswith(
        "plain text.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == render(chat(Message("system", ""), Message("user", "hi"), tools=tools))


def test_definitions_keep_the_clients_order_and_characters(render: Any, chat: Chat) -> None:
    function = {"parameters": {"z": 1, "a": "é"}, "name": "f"}
    text = render(chat("hi", tools=[{"function": function, "type": "function"}]))
    assert (
        '{"function": {"parameters": {"z": 1, "a": "é"}, "name": "f"}, "type": "function"}' in text
    )


def test_calls_and_results_are_turns_of_text(render: Any, chat: Chat) -> None:
    calls = assistant("Wait.", call("f", '{"b":1,"a":"é"}'), call("g", "", "2"))
    results = [Message("tool", "one", tool_call_id="1"), Message("tool", "two", tool_call_id="2")]
    text = render(chat(Message("system", "s"), Message("user", "hi"), calls, *results))
    assert text.endswith(
        "<|im_start|>assistant\nWait.\n"
        '<tool_call>[{"name": "f", "arguments": {"b": 1, "a": "é"}}, '
        '{"name": "g", "arguments": {}}]</tool_call><|im_end|>\n'
        "<|im_start|>tool\none<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_calls_need_no_content(render: Any, chat: Chat) -> None:
    text = render(chat("hi", assistant("", call("f", "{}"))))
    assert '<|im_start|>assistant\n<tool_call>[{"name": "f", "arguments": {}}]</tool_call>' in text


def test_without_roles_for_it_everything_is_the_users(build: Any, chat: Chat, tools: Any) -> None:
    template = ChatTemplate(build("byte_level", "llama2"))  # roles must alternate
    calls = assistant("", call("f", "{}"), call("g", "{}", "2"))
    results = [Message("tool", "one", tool_call_id="1"), Message("tool", "two", tool_call_id="2")]
    prompt = chat("hi", calls, *results, Message("user", "well?"), tools=tools)
    text = template.render(template.prepare(prompt))
    assert text.startswith("<|bos|>[INST] You can call")
    assert "plain text.\n\nhi [/INST]" in text
    assert text.endswith(
        "[INST] <tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response>\nwell? [/INST]"
    )


def test_a_conversation_with_tools_only_grows(
    smollm2_prompts: PromptTokenizer, chat: Chat, tools: Any
) -> None:
    turns: list[Any] = [Message("user", "hi")]
    encoded = smollm2_prompts.encode_chat(chat(*turns, tools=tools)).token_ids
    template = smollm2_prompts.template
    assert template.tool_format.syntax is not None
    for number in range(6):
        id = str(number)
        output = template.tool_format.syntax.write([("search", {"query": f"q{number}"})])
        made = CallParser(template.tool_format, tools).push(output)[1][0]
        turns += [
            assistant("", call(made.name, made.arguments, id)),
            Message("tool", f"result {number}", tool_call_id=id),
        ]
        ids = smollm2_prompts.encode_chat(chat(*turns, tools=tools)).token_ids
        assert ids[: len(encoded)] == encoded
        assert smollm2_prompts.vocabulary.decode(ids[len(encoded) :]).startswith(output)
        encoded = ids


def test_the_adapters_tags_in_a_clients_strings_are_text(
    build: Any, chat: Chat, tools: Any
) -> None:
    prompts = PromptTokenizer(build("byte_level", "chatml"))  # has <tool_call> as a token
    call_id = build("byte_level", "chatml").convert_tokens_to_ids("<tool_call>")

    def count(text: str) -> int:
        turns = [text, assistant(text, call("f", json.dumps({"a": text}))), Message("tool", text)]
        return prompts.encode_chat(chat(*turns, tools=tools)).token_ids.count(call_id)

    assert count("<tool_call>") == count("x") + 1  # what the model wrote itself
    assert count("x") == 2  # the form in the definitions, and the call


@settings(deadline=None)
@given(
    arguments=st.dictionaries(
        st.text(st.characters(codec="utf-8")),
        st.text(st.characters(codec="utf-8")) | st.integers() | st.lists(st.booleans()),
    )
)
def test_a_call_in_the_history_reads_as_it_was_generated(
    arguments: dict[str, Any], smollm2_prompts: PromptTokenizer, tools: Any
) -> None:
    form = smollm2_prompts.template.tool_format
    assert form.syntax is not None
    output = form.syntax.write([("search", arguments)])
    parser = CallParser(form, tools)
    (made,) = parser.push(output)[1]
    history = (Message("user", "hi"), assistant("", call(made.name, made.arguments)))
    text = smollm2_prompts.encode_chat(ChatPrompt(history)).text
    assert f"<|im_start|>assistant\n{output}<|im_end|>" in text
