from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ragcache.prompt.layout import TokenizedPrompt
from ragcache.prompt.tokenize import PromptTokenizer
from ragcache.types import Breakpoint, ChatPrompt, Message

Chat = Callable[..., ChatPrompt]
Prompts = Callable[..., PromptTokenizer]
SYSTEM, USER = Message("system", "be brief"), Message("user", "hi")
TEMPLATES = [
    ("byte_level", "chatml"),
    ("byte_level", "hermes"),
    ("byte_level", "llama3"),
    ("metaspace", "chatml"),
    ("prepending", "chatml"),
]


def text_of(tokenizer: PromptTokenizer, token_ids: Iterable[int]) -> str:
    return b"".join(map(tokenizer.vocabulary.token_bytes, token_ids)).decode("utf-8", "replace")


def read(tokenizer: PromptTokenizer, prompt: TokenizedPrompt) -> list[tuple[str, str]]:
    """Name and text of each segment."""
    return [
        (name, text_of(tokenizer, prompt.token_ids[start:end]))
        for name, start, end in prompt.layout().segments
    ]


def read_chat(tokenizer: PromptTokenizer, *turns: Message, tools: Any = ()) -> dict[str, str]:
    found = read(tokenizer, tokenizer.encode_chat(ChatPrompt(turns, tuple(tools))))
    assert len(dict(found)) == len(found)
    return dict(found)


def before(tokenizer: PromptTokenizer, prompt: ChatPrompt, *points: Breakpoint) -> list[str | None]:
    """The text before each breakpoint."""
    plain = tokenizer.encode_chat(prompt)
    marked = tokenizer.encode_chat(replace(prompt, breakpoints=points))
    assert marked.token_ids == plain.token_ids
    assert marked.layout().segments == plain.layout().segments
    return [
        None if end is None else text_of(tokenizer, marked.token_ids[:end])
        for end in marked.layout().breakpoints
    ]


@pytest.fixture
def with_template(build: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], PromptTokenizer]:
    """Make a tokenizer with a template of the test's own."""

    def make(template: str) -> PromptTokenizer:
        tokenizer = build("byte_level", "chatml")
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return PromptTokenizer(tokenizer)

    return make


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_part_ends_with_its_content_and_the_template_goes_on_in_the_next(
    smollm2_prompts: PromptTokenizer,
) -> None:
    assert read_chat(smollm2_prompts, SYSTEM, USER) == {
        "system": "<|im_start|>system\nbe brief",
        "messages.1": "<|im_end|>\n<|im_start|>user\nhi",
        "generation_prompt": "<|im_end|>\n<|im_start|>assistant\n",
    }


def test_what_a_template_adds_by_itself_belongs_to_the_message_it_comes_with(
    smollm2_prompts: PromptTokenizer,
) -> None:
    segments = read_chat(smollm2_prompts, USER)
    assert list(segments) == ["messages.0", "generation_prompt"]
    assert "named SmolLM" in segments["messages.0"]


@pytest.mark.parametrize("template", ["hermes", "llama3"])
def test_tools_behind_the_system_message_are_a_part(
    template: str, prompts: Prompts, tools: Any
) -> None:
    segments = read_chat(prompts("byte_level", template), SYSTEM, USER, tools=tools)
    assert list(segments) == ["system", "tools", "messages.1", "generation_prompt"]
    assert segments["system"].endswith("be brief")
    assert "Search the documents" in segments["tools"]
    assert segments["tools"].endswith('"string')
    assert segments["messages.1"].endswith("hi")


def test_tools_in_front_of_the_system_text_come_first(
    smollm2_prompts: PromptTokenizer, tools: Any
) -> None:
    segments = read_chat(smollm2_prompts, SYSTEM, USER, tools=tools)
    assert list(segments) == ["tools", "system", "messages.1", "generation_prompt"]
    assert "Search the documents" in segments["tools"]
    assert segments["system"].endswith("plain text.\n\nbe brief")
    assert segments["messages.1"] == "<|im_end|>\n<|im_start|>user\nhi"


def test_calls_and_results_that_become_text_keep_their_parts(prompts: Prompts, tools: Any) -> None:
    calls = Message("assistant", "wait", tool_calls=(call("search", '{"query": "caches"}'),))
    turns = USER, calls, Message("tool", "found"), Message("user", "thanks")
    segments = read_chat(prompts("byte_level", "llama2"), *turns, tools=tools)
    assert segments["tools"].endswith('"string')
    assert segments["messages.0"].endswith("plain text.\n\nhi")
    assert segments["messages.1"].endswith('"arguments": {"query": "caches')
    assert segments["messages.2"].endswith("<tool_response>\nfound")
    assert segments["messages.3"] == "\n</tool_response>\nthanks"


def test_tools_that_a_template_moves_are_found_where_they_are(prompts: Prompts, tools: Any) -> None:
    turns = USER, Message("assistant", "yo"), Message("user", "bye")
    segments = read_chat(prompts("byte_level", "last_tools"), *turns, tools=tools)
    assert list(segments) == [
        "messages.0",
        "messages.1",
        "tools",
        "messages.2",
        "generation_prompt",
    ]
    assert segments["tools"].startswith("</s>[TOOLS]")


def test_system_messages_at_the_head_share_a_part_and_later_ones_are_messages(
    prompts: Prompts,
) -> None:
    turns = SYSTEM, Message("developer", "and kind"), USER, Message("system", "now"), USER
    assert read_chat(prompts("byte_level"), *turns) == {
        "system": "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>system\nand kind",
        "messages.2": "<|im_end|>\n<|im_start|>user\nhi",
        "messages.3": "<|im_end|>\n<|im_start|>system\nnow",
        "messages.4": "<|im_end|>\n<|im_start|>user\nhi",
        "generation_prompt": "<|im_end|>\n<|im_start|>assistant\n",
    }


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ('{"query": "caches", "limit": 3}', '"limit'),
        ('{"limit": 3, "query": ["a", {"b": "caches "}, ""]}', '"caches'),
        ("{}", '"name": "search'),
        ('{"": ""}', '"name": "search'),
        ("no JSON", '"no JSON'),
    ],
)
def test_a_call_ends_with_its_last_string(arguments: str, end: str, prompts: Prompts) -> None:
    calls = call("search", '{"query": "first"}'), call("search", arguments)
    turns = USER, Message("assistant", "", tool_calls=calls), Message("tool", "found")
    segments = read_chat(prompts("byte_level", "hermes"), *turns)
    assert list(segments) == ["messages.0", "messages.1", "messages.2", "generation_prompt"]
    assert segments["messages.1"].endswith(end)
    assert segments["messages.1"].count("<tool_call>") == 2
    assert segments["messages.2"].endswith("<|im_start|>tool\nfound")


def test_a_message_without_text_has_no_part(prompts: Prompts) -> None:
    turns = SYSTEM, Message("user", ""), Message("assistant", " \n"), Message("user", "bye")
    segments = read_chat(prompts("byte_level"), *turns)
    assert list(segments) == ["system", "messages.3", "generation_prompt"]
    assert segments["messages.3"].count("<|im_start|>") == 3


def test_a_message_that_the_template_leaves_out_has_no_part(
    with_template: Callable[[str], PromptTokenizer],
) -> None:
    tokenizer = with_template(
        "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content + '<|im_end|>' }}"
        "{% endif %}{% endfor %}"
    )
    turns = Message("user", "a"), Message("assistant", "b"), Message("user", "c")
    assert read_chat(tokenizer, *turns) == {
        "messages.0": "a",
        "messages.2": "<|im_end|>c",
        "generation_prompt": "<|im_end|>",
    }


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_white_space_at_the_end_belongs_to_what_follows(template: str, prompts: Prompts) -> None:
    tokenizer = prompts("byte_level", template)
    segments = read_chat(tokenizer, SYSTEM, Message("user", "hi \n"), USER)
    assert segments["messages.1"].endswith("hi")
    assert segments["messages.2"].startswith(" \n<|im_end|>" if template == "chatml" else "<|eot|>")


def test_equal_contents_are_told_apart(prompts: Prompts) -> None:
    segments = read(
        prompts("byte_level"), prompts("byte_level").encode_chat(ChatPrompt((USER,) * 3))
    )
    assert [text.count("hi") for _, text in segments] == [1, 1, 1, 0]


def test_marks_in_a_message_are_its_text(prompts: Prompts) -> None:
    for content in ("a\ufdd30\ufdd4b", "\ufdd3", "\ufdd31\ufdd4", "\ufdd22\ufdd20x"):
        tokenizer = prompts("byte_level")
        prompt = tokenizer.encode_chat(ChatPrompt((Message("user", content), USER)))
        segments = read(tokenizer, prompt)
        assert segments[0] == ("messages.0", "<|im_start|>user\n" + content)
        assert [name for name, _ in segments[1:]] == ["messages.1", "generation_prompt"]


def test_raw_text_is_one_segment(smollm2_prompts: PromptTokenizer) -> None:
    prompt = smollm2_prompts.encode_text("<|im_start|>grüße 😀!")
    assert prompt.layout().segments == (("prompt", 0, len(prompt.token_ids)),)
    assert prompt.layout().breakpoints == ()
    assert prompt.place(0) == ("prompt", 0)
    assert prompt.place(len(prompt.token_ids) - 1) == ("prompt", len("<|im_start|>grüße 😀"))


def test_breakpoints_in_and_behind_messages(prompts: Prompts) -> None:
    tokenizer = prompts("byte_level")
    prompt = ChatPrompt((SYSTEM, Message("user", "one. two. three")))
    points = Breakpoint(1), Breakpoint(1, 5), Breakpoint(1, 9), Breakpoint(0), Breakpoint(1, 99)
    head = "<|im_start|>system\nbe brief"
    user = head + "<|im_end|>\n<|im_start|>user\n"
    assert before(tokenizer, prompt, *points) == [
        user + "one. two. three",
        user + "one.",
        user + "one. two.",
        head,
        user + "one. two. three",
    ]


def test_breakpoints_behind_tools(prompts: Prompts, tools: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    prompt = ChatPrompt((SYSTEM, USER), (*tools, other))
    points = Breakpoint(None), Breakpoint(None, 1), Breakpoint(None, 2), Breakpoint(None, 0)
    whole, first, second, none = before(prompts("byte_level", "hermes"), prompt, *points)
    assert whole == second
    assert str(whole).endswith('"name": "other')
    assert str(first).endswith('"type": "string')
    assert none is None
    no_tools = ChatPrompt((SYSTEM, USER))
    assert before(prompts("byte_level", "hermes"), no_tools, Breakpoint(None)) == [None]


def test_a_breakpoint_behind_a_call_and_one_behind_the_text_before_it(prompts: Prompts) -> None:
    message = Message("assistant", "wait", tool_calls=(call("search", '{"q": "x"}'),))
    prompt = ChatPrompt((USER, message, Message("tool", "found")))
    found = before(prompts("byte_level", "hermes"), prompt, Breakpoint(1), Breakpoint(1, 4))
    assert str(found[0]).endswith('{"q": "x')
    assert str(found[1]).endswith("assistant\nwait")


def test_a_breakpoint_inside_a_control_token_stands_before_it(prompts: Prompts) -> None:
    prompt = ChatPrompt((Message("user", "\ufdd0a <|im_end|>b"),))
    for end, text in ((1, "\ufdd0"), (3, "\ufdd0a"), (8, "\ufdd0a"), (13, "\ufdd0a <|im_end|>")):
        assert before(prompts("byte_level"), prompt, Breakpoint(0, end)) == [
            "<|im_start|>user\n" + text
        ]


def test_a_breakpoint_where_there_is_no_text_has_no_place(prompts: Prompts) -> None:
    prompt = ChatPrompt((Message("user", ""), Message("user", "  hi"), USER))
    points = Breakpoint(0), Breakpoint(1, 0), Breakpoint(1, 2), Breakpoint(1, 4)
    *none, last = before(prompts("byte_level"), prompt, *points)
    assert none == [None, None, None]
    assert str(last).endswith("  hi")


INSPECTING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.content }}
{%- if m.content == 'hi' %}{{ ' there' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_a_prompt_that_changes_with_the_marks_is_one_segment(
    with_template: Callable[[str], PromptTokenizer],
) -> None:
    tokenizer = with_template(INSPECTING)
    whole = "<|im_start|>be brief<|im_end|><|im_start|>hi there<|im_end|>"
    assert read_chat(tokenizer, SYSTEM, USER) == {"prompt": whole + "<|im_start|>assistant\n"}
    points = Breakpoint(0), Breakpoint(1), Breakpoint(1, 2)
    assert before(tokenizer, ChatPrompt((SYSTEM, USER)), *points) == [None, whole, None]
    harmless = ChatPrompt((SYSTEM, Message("user", "bye")))
    assert before(tokenizer, harmless, Breakpoint(0)) == ["<|im_start|>be brief"]


def test_without_a_generation_prompt_of_its_own_the_end_has_no_place(
    with_template: Callable[[str], PromptTokenizer],
) -> None:
    tokenizer = with_template("{{ add_generation_prompt }}" + INSPECTING)
    assert before(tokenizer, ChatPrompt((USER,)), Breakpoint(0)) == [None]


def test_a_template_that_refuses_the_marks_leaves_one_segment(
    with_template: Callable[[str], PromptTokenizer],
) -> None:
    tokenizer = with_template(
        "{% for m in messages %}{{ m.content }}"
        "{% if m.content != 'hi' %}{{ raise_exception('say hi') }}{% endif %}{% endfor %}"
    )
    assert read_chat(tokenizer, USER) == {"prompt": "hi"}


def test_a_template_that_reads_tools_still_shows_where_messages_end(
    with_template: Callable[[str], PromptTokenizer],
) -> None:
    tokenizer = with_template(
        "{% for t in tools or [] %}{% for name in t.function.parameters.properties %}{{ name }}"
        "{{ '!' if name in t.function.parameters.required else '?' }}{% endfor %}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '[TOOL_CALLS] [' + c.function.name }}{% endfor %}{% endfor %}"
    )
    parameters = {"properties": {"q": {}}, "required": ["q"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert read_chat(tokenizer, SYSTEM, USER, tools=[tool]) == {
        "system": "q!<|im_start|>be brief",
        "messages.1": "<|im_start|>hi",
        "generation_prompt": "",
    }


@pytest.mark.parametrize("template", ["chatml", "llama3"])  # as it is, and trimmed
def test_a_token_is_placed_at_its_first_character_in_the_content(
    template: str, prompts: Prompts
) -> None:
    content = "  grüße 😀😀 naïve 東京 ☃ dogs \n"
    tokenizer = prompts("byte_level", template)
    prompt = tokenizer.encode_chat(ChatPrompt((SYSTEM, Message("user", content), USER)))
    start = prompt.text.index(content.strip()) - 2
    segment = next(s for s in prompt.layout().segments if s.name == "messages.1")
    read_bytes = tokenizer.vocabulary.token_bytes
    for token in range(segment.start, segment.end):
        text = b"".join(map(read_bytes, prompt.token_ids[:token])).decode("utf-8", "ignore")
        assert prompt.place(token) == ("messages.1", max(0, len(text) - start))
    assert prompt.place(segment.end)[0] == "messages.2"


@pytest.mark.parametrize("family", ["metaspace", "prepending"])
def test_places_behind_a_control_token_that_is_data(family: str, prompts: Prompts) -> None:
    content = "the</s>dog 東京😀"
    prompt = prompts(family).encode_chat(ChatPrompt((Message("user", content),)))
    places = {prompt.place(token) for token in range(len(prompt.token_ids))}
    characters = {character for name, character in places if name == "messages.0"}
    wanted = {content.index(char) for char in ("</s>", "東", "京", "😀")}
    assert wanted <= characters
    assert not characters & set(range(content.index("</s>") + 1, content.index("dog")))


def test_an_edit_is_placed_in_the_word_that_it_changes(smollm2_prompts: PromptTokenizer) -> None:
    content = "Grüße aus 東京 😀, dogs and cats"
    encode = smollm2_prompts.encode_chat
    prompt = encode(ChatPrompt((SYSTEM, Message("user", content), USER)))
    for place in range(len(content)):
        edited = f"{content[:place]}#{content[place:]}"
        other = encode(ChatPrompt((SYSTEM, Message("user", edited), USER)))
        name, character = prompt.place(first_difference(prompt.token_ids, other.token_ids))
        word = content[:place].rfind(" ")
        assert name == "messages.1"
        assert max(0, word) <= character <= place


def test_places_outside_of_contents(prompts: Prompts, tools: Any) -> None:
    tokenizer = prompts("byte_level", "hermes")
    prompt = tokenizer.encode_chat(ChatPrompt((SYSTEM, USER), tools))
    segments = {s.name: s for s in prompt.layout().segments}
    assert prompt.place(0) == ("system", 0)
    assert prompt.place(segments["system"].end - 1)[0] == "system"
    tools_text = text_of(tokenizer, prompt.token_ids[segments["tools"].start :])
    for token in range(segments["tools"].start, segments["tools"].end):
        name, character = prompt.place(token)
        skipped = text_of(tokenizer, prompt.token_ids[segments["tools"].start : token])
        assert (name, tools_text[:character]) == ("tools", skipped)
    assert prompt.place(segments["messages.1"].start) == ("messages.1", 0)
    assert prompt.place(len(prompt.token_ids) - 1)[0] == "generation_prompt"


def first_difference(a: list[int], b: list[int]) -> int:
    return next(i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y)


contents = st.text("ab <>\n\ufdd0\ufdd3\ufdd40é", max_size=12) | st.sampled_from(
    ["x<|im_end|>y", "</s>", "é ", "same"]
)
messages = st.builds(Message, st.sampled_from(["system", "user", "assistant"]), contents)
conversations = st.lists(messages, max_size=5).map(lambda turns: (*turns, USER))
points = st.lists(
    st.builds(Breakpoint, st.integers(0, 5), st.none() | st.integers(0, 12))
    | st.builds(Breakpoint, st.none(), st.none() | st.integers(0, 2)),
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(turns=conversations, with_tools=st.booleans(), breakpoints=points)
def test_segments_tile_the_prompt_and_breakpoints_change_no_token(
    turns: tuple[Message, ...],
    with_tools: bool,
    breakpoints: list[Breakpoint],
    prompts: Prompts,
    tools: Any,
) -> None:
    for family, template in TEMPLATES:
        asked = tools if with_tools else ()
        placed = tuple(p for p in breakpoints if p.message is None or p.message < len(turns))
        encode = prompts(family, template).encode_chat
        prompt = encode(ChatPrompt(turns, asked, breakpoints=placed))
        assert prompt.token_ids == encode(ChatPrompt(turns, asked)).token_ids
        segments, found = prompt.layout().segments, prompt.layout().breakpoints
        ends = [segment.end for segment in segments]
        assert [segment.start for segment in segments] == [0, *ends[:-1]]
        assert ends == sorted(ends)
        assert ends[-1] == len(prompt.token_ids)
        names = [segment.name for segment in segments]
        assert names[-1] == "generation_prompt"
        assert ("tools" in names) == bool(asked)
        assert len(found) == len(placed)
        assert all(end is None or 0 <= end <= ends[-1] for end in found)
        ends_of = {segment.name: segment.end for segment in segments}
        for point, end in zip(placed, found, strict=True):
            if point.end is None and f"messages.{point.message}" in ends_of:
                assert end == ends_of[f"messages.{point.message}"]


@settings(deadline=None, max_examples=60)
@given(turns=conversations, number=st.integers(0, 5), content=contents, with_tools=st.booleans())
def test_an_edit_changes_tokens_only_from_its_own_segment_on(
    turns: tuple[Message, ...],
    number: int,
    content: str,
    with_tools: bool,
    prompts: Prompts,
    tools: Any,
) -> None:
    assume(number < len(turns) and turns[number].content != content)
    edited = list(turns)
    edited[number] = replace(turns[number], content=content)
    for template in ("chatml", "hermes"):
        tokenizer = prompts("byte_level", template)
        asked = tools if with_tools else ()
        prompt = tokenizer.encode_chat(ChatPrompt(turns, asked))
        other = tokenizer.encode_chat(ChatPrompt(tuple(edited), asked))
        if prompt.token_ids == other.token_ids:  # the template leaves out what differs
            continue
        token = first_difference(prompt.token_ids, other.token_ids)
        unchanged = [
            segment.end
            for segment in prompt.layout().segments
            if segment.name.startswith("messages.") and int(segment.name[9:]) < number
        ]
        assert token >= max(unchanged, default=0)
