from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.prompt.tokenize import PromptTokenizer, TokenizedPrompt
from ragcache.types import ChatPrompt, Message

Chat = Callable[..., ChatPrompt]
Prompts = Callable[..., PromptTokenizer]


def read(tokenizer: PromptTokenizer, prompt: TokenizedPrompt) -> dict[str, str]:
    """The text of each segment."""
    token_bytes = tokenizer.vocabulary.token_bytes
    return {
        name: b"".join(map(token_bytes, prompt.token_ids[start:end])).decode("utf-8", "replace")
        for name, start, end in prompt.segments()
    }


def test_segments_are_named_parts_of_the_prompt(
    smollm2_prompts: PromptTokenizer, chat: Chat
) -> None:
    prompt = smollm2_prompts.encode_chat(chat(Message("system", "be brief"), Message("user", "hi")))
    assert read(smollm2_prompts, prompt) == {
        "system": "<|im_start|>system\nbe brief<|im_end|>\n",
        "messages.1": "<|im_start|>user\nhi<|im_end|>\n",
        "generation_prompt": "<|im_start|>assistant\n",
    }


def test_what_a_template_adds_by_itself_belongs_to_the_message_it_comes_with(
    smollm2_prompts: PromptTokenizer, chat: Chat
) -> None:
    segments = read(smollm2_prompts, smollm2_prompts.encode_chat(chat("hi")))
    assert list(segments) == ["messages.0", "generation_prompt"]
    assert "named SmolLM" in segments["messages.0"]


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        ("hermes", "\n\n# Tools\n<tools>", "</tool_call><|im_end|>\n"),
        ("llama3", "<|start|>user<|end|>\n\nUse these", "}\n  }\n}"),
    ],
)
def test_tools_are_cut_out_of_the_part_that_holds_them(
    template: str, start: str, end: str, prompts: Prompts, chat: Chat, tools: Any
) -> None:
    tokenizer = prompts("byte_level", template)
    conversation = chat(Message("system", "be brief"), Message("user", "hi"), tools=tools)
    segments = read(tokenizer, tokenizer.encode_chat(conversation))
    assert list(segments) == ["system", "tools", "messages.1", "generation_prompt"]
    assert segments["tools"].startswith(start)
    assert segments["tools"].endswith(end)
    assert "Search the documents" in segments["tools"]
    assert "be brief" in segments["system"]
    assert "hi" in segments["messages.1"]


def test_tools_without_a_system_message_come_first(
    prompts: Prompts, chat: Chat, tools: Any
) -> None:
    tokenizer = prompts("byte_level", "hermes")
    segments = read(tokenizer, tokenizer.encode_chat(chat("hi", tools=tools)))
    assert list(segments) == ["tools", "messages.0", "generation_prompt"]
    assert segments["messages.0"] == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_template_that_moves_its_tools_still_has_all_segments(
    prompts: Prompts, chat: Chat, tools: Any
) -> None:
    tokenizer = prompts("byte_level", "last_tools")
    segments = read(tokenizer, tokenizer.encode_chat(chat("hi", "yo", "bye", tools=tools)))
    assert list(segments) == [
        "messages.0",
        "messages.1",
        "tools",
        "messages.2",
        "generation_prompt",
    ]
    assert segments["tools"].startswith("[TOOLS]")
    assert segments["messages.2"] == "[INST]bye[/INST]"


def test_a_prefix_that_the_template_refuses_joins_the_next_part(
    build: Any, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build("byte_level", "chatml")
    refuse = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", refuse + tokenizer.chat_template)
    prompts = PromptTokenizer(tokenizer)
    prompt = prompts.encode_chat(chat(Message("system", "s"), Message("user", "u")))
    segments = read(prompts, prompt)
    assert segments["system"] == ""
    assert segments["messages.1"].startswith("<|im_start|>system\ns<|im_end|>")


def test_segments_stay_in_order_where_a_template_counts_its_messages(
    build: Any, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build("byte_level", "chatml")
    counting = "{% if messages | length == 2 %}two{% endif %}" + tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", counting)
    prompts = PromptTokenizer(tokenizer)
    segments = read(prompts, prompts.encode_chat(chat("a", "b", "c")))
    assert segments["messages.0"] == "<|im_start|>user\na<|im_end|>\n"
    assert segments["messages.1"] == ""
    assert segments["messages.2"].endswith("<|im_start|>user\nc<|im_end|>\n")


def test_raw_text_is_one_segment(smollm2_prompts: PromptTokenizer) -> None:
    prompt = smollm2_prompts.encode_text("hello world")
    assert prompt.segments() == (("prompt", 0, len(prompt.token_ids)),)


contents = st.text("ab <>\n\ufdd0é", max_size=12) | st.sampled_from(["x<|im_end|>y", "</s>", "é"])
messages = st.lists(st.builds(Message, st.sampled_from(["system", "user", "assistant"]), contents))


@settings(deadline=None, max_examples=50)
@given(messages=messages, with_tools=st.booleans())
def test_segments_tile_the_prompt(
    messages: list[Message], with_tools: bool, prompts: Prompts, tools: Any
) -> None:
    conversation = (*messages, Message("user", "u"))
    for family, template in (
        ("byte_level", "hermes"),
        ("byte_level", "llama3"),
        ("metaspace", "chatml"),
        ("prepending", "chatml"),
    ):
        asked = tools if with_tools and template != "chatml" else ()
        prompt = prompts(family, template).encode_chat(ChatPrompt(conversation, asked))
        segments = prompt.segments()
        starts, ends = [s.start for s in segments], [s.end for s in segments]
        assert starts == [0, *ends[:-1]]
        assert ends[-1] == len(prompt.token_ids)
        assert ends == sorted(ends)
        assert ("tools" in {s.name for s in segments}) == bool(asked)
