from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from ragcache.prompt.calls import CallParser
from ragcache.prompt.tool_format import CallSyntax, ToolFormat, native_format
from ragcache.types import ToolCall

Forms = Callable[[str], ToolFormat]
Read = Callable[..., tuple[str, list[ToolCall]]]

TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},
    {
        "type": "function",
        "function": {
            "name": "save",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
    },
]
NATIVE = ("hermes", "smollm2", "llama3", "mistral", "mistral_list")
SIZES = (1, 2, 3, 7, 1_000_000)
TEXT = (
    'Ünï 😀 "quoted" \\ {[()]}}\n\t</tool_call> <tool_call> [TOOL_CALLS] ]</tool_call>}</tool_call>'
)


def parse(
    form: ToolFormat, text: str, size: int = 1_000_000, prefix: str = ""
) -> tuple[str, list[ToolCall]]:
    """Everything that a parser returns for a text in pieces of some size."""
    parser = CallParser(form, TOOLS, prefix=prefix)
    texts, calls = [], []
    for start in range(0, len(text), size):
        more, found = parser.push(text[start : start + size])
        texts.append(more)
        calls += found
    more, found = parser.finish()
    return "".join([*texts, more]), calls + found


@pytest.fixture(scope="session")
def read(forms: Forms) -> Read:
    """Parse a text in pieces of several sizes, which must not matter."""

    def parse_all(name: str, text: str, prefix: str = "") -> tuple[str, list[ToolCall]]:
        results = [parse(forms(name), text, size, prefix) for size in SIZES]
        assert all(result == results[0] for result in results)
        return results[0]

    return parse_all


def call(name: str = "find", **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def syntax_of(form: ToolFormat) -> CallSyntax:
    assert form.syntax is not None
    return form.syntax


@pytest.mark.parametrize("name", NATIVE)
def test_what_the_syntax_writes_is_read_back(name: str, forms: Forms, read: Read) -> None:
    calls = [call("save", text=TEXT, count=2), call(), call(a=[1.5, None, {"b": True}])]
    syntax = syntax_of(forms(name))
    if syntax.separator is None:
        calls = calls[:1]
    text = syntax.write((made.name, json.loads(made.arguments)) for made in calls)
    assert read(name, text) == ("", calls)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")) | st.sampled_from([TEXT, '"', "\\", "</tool_call>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None)
@given(
    name=st.sampled_from(NATIVE),
    arguments=st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=3),
    sizes=st.integers(1, 20),
)
@example(name="hermes", arguments={"text": "}\n</tool_call>"}, sizes=1)
def test_any_arguments_survive_any_cutting(
    name: str, arguments: dict[str, Any], sizes: int, forms: Forms
) -> None:
    syntax = syntax_of(forms(name))
    text = syntax.write([("find", arguments)])
    assert parse(forms(name), text, sizes) == ("", [call("find", **arguments)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name":"save","arguments":VALUES}</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": VALUES, "name": "save"}\n</tool_call>\n'),
        ("smollm2", '<tool_call>\n[{"name":"save","arguments":VALUES}]\n</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "save", "parameters": VALUES}'),
        ("llama3", '\n{"type": "function", "name": "save", "parameters": VALUES}\n'),
        ("mistral_list", '[TOOL_CALLS][{"name": "save", "arguments": VALUES, "id": "abc"}]'),
        ("mistral", "[TOOL_CALLS]save[CALL_ID]abc123[ARGS]VALUES"),
        ("mistral", "[TOOL_CALLS] save [ARGS] VALUES"),
    ],
)
def test_other_ways_to_write_a_call_are_read(name: str, text: str, read: Read) -> None:
    made = call("save", text="see </tool_call> here, and }</tool_call>", count=1)
    assert read(name, text.replace("VALUES", made.arguments)) == ("", [made])


def test_text_before_and_after_calls_is_kept(read: Read) -> None:
    one = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    assert read("hermes", f"Let me see.\n\n{one}") == ("Let me see.", [call()])
    assert read("hermes", f"{one}\n{one}\n") == ("", [call(), call()])
    assert read("hermes", f"\n{one}\nDone.\n") == ("\nDone.\n", [call()])
    assert read("hermes", " just\n text \n") == (" just\n text \n", [])


def test_nothing_but_the_start_of_a_call_is_kept_back(forms: Forms) -> None:
    parser = CallParser(forms("hermes"), TOOLS)
    assert parser.push("one <tool") == ("one", [])
    assert parser.push("box two ") == (" <toolbox two", [])
    assert parser.push("<tool_call>") == ("", [])
    assert parser.push(' {"name": "find", "arguments": {}}') == ("", [])
    assert parser.push("</tool_call>") == ("", [call()])
    assert parser.push("!") == ("!", [])
    assert parser.finish() == ("", [])


@pytest.mark.parametrize("name", [*NATIVE, "qwen_xml"])
@pytest.mark.parametrize(
    "text",
    [
        'Use {"name":"find","arguments":{}} in your config',
        "Write <tool_call> before and </tool_call> after it, or [TOOL_CALLS] and [ARGS].",
        '{"name": "find"',
        '{"name": "find", "age": 3}',
        '{"answer": 42}',
        "[1, 2]",
        "",
        "\n",
    ],
)
def test_what_only_looks_like_a_call_is_text(name: str, text: str, read: Read) -> None:
    assert read(name, text) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find"}</tool_call>'),
        ("hermes", '<tool_call>{"name": {}, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{name: "find", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "\\ud83d"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": ' + '{"a":' * 9_000 + "</tool_call>"),
        ("smollm2", '<tool_call>[{"name": "find", "arguments": {}}, 5]</tool_call>'),
        ("smollm2", '<tool_call>[{"name": "find", "arguments": {}}, {}]</tool_call>'),
        ("llama3", '{"name": "nobody", "parameters": {}}'),
        ("mistral_list", '[TOOL_CALLS] [{"name": "find", "arguments": 3}]'),
        ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
        ("qwen_xml", "<tool_call><function=nobody></function></tool_call>"),
        (
            "qwen_xml",
            "<tool_call><function=find><parameter=a>1<parameter=b>2</function></tool_call>",
        ),
        (
            "qwen_xml",
            "<tool_call><function=find>now<parameter=a>1</parameter></function></tool_call>",
        ),
    ],
)
def test_a_call_that_cannot_be_made_is_text(name: str, text: str, read: Read) -> None:
    assert read(name, text) == (text, [])


def test_a_bad_call_does_not_take_a_good_one_with_it(read: Read) -> None:
    bad, good = (
        f'<tool_call>\n{{"name": "find", "arguments": {arguments}}}\n</tool_call>'
        for arguments in ("{]", "{}")
    )
    assert read("hermes", f"{bad}\n{good}") == (bad, [call()])
    assert read("mistral", "[TOOL_CALLS]find[ARGS]{]\n[TOOL_CALLS]find[ARGS]{}") == (
        "[TOOL_CALLS]find[ARGS]{]",
        [call()],
    )


@pytest.mark.parametrize("name", [*NATIVE, "qwen_xml"])
def test_a_call_that_is_cut_off_is_text(name: str, forms: Forms) -> None:
    whole = "<tool_call><function=save><parameter=text>\na\n</parameter></function>\n</tool_call>"
    if (syntax := forms(name).syntax) is not None:
        whole = syntax.write([("save", {"text": "a}", "count": [1, 2]})])
    complete = len(whole[: whole.rfind("}") + 1]) if syntax else len(whole)
    for length in range(complete):
        text, calls = parse(forms(name), whole[:length], 3)
        assert (text, calls) == (whole[:length], []) or (length, calls) == (complete - 1, [])
    assert parse(forms(name), whole)[1]


@pytest.mark.parametrize("name", ["smollm2", "mistral_list"])
def test_of_a_list_that_is_cut_off_the_complete_calls_count(
    name: str, forms: Forms, read: Read
) -> None:
    syntax = syntax_of(forms(name))
    calls = [call("find", a="]}, {"), call("save", text=f"{syntax.trigger}find")]
    whole = syntax.write((made.name, json.loads(made.arguments)) for made in calls)
    first = len(syntax.write([("find", {"a": "]}, {"})])) - len(syntax.end)
    complete = len(whole) - len(syntax.end)
    for length in range(first, complete):
        assert read(name, whole[:length]) == (whole[first:length], calls[:1])
    assert read(name, whole[:complete]) == ("", calls)


def test_a_list_with_anything_but_calls_in_it_is_text_when_it_is_cut_off_too(read: Read) -> None:
    for entry in ("5", '{"name": "nobody", "arguments": {}}'):
        text = f'<tool_call>[{{"name": "find", "arguments": {{}}}}, {entry}, {{"name": '
        assert read("smollm2", text) == (text, [])


def test_json_that_is_complete_needs_no_closing_tag(read: Read) -> None:
    assert read("hermes", '<tool_call>{"name": "find", "arguments": {}}') == ("", [call()])


def test_an_empty_list_of_calls_is_no_answer_to_show(read: Read) -> None:
    assert read("smollm2", "<tool_call>[]</tool_call>") == ("", [])


def test_parameters_in_tags_get_the_types_of_the_tool(read: Read) -> None:
    text = (
        "<tool_call>\n<function=save>\n<parameter=text>\n  two\nlines \n</parameter>\n"
        "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    assert read("qwen_xml", text) == ("", [call("save", text="  two\nlines ", count=3)])
    assert read("hermes", '<tool_call>{"name":"save","arguments":{"count":"3"}}</tool_call>') == (
        "",
        [call("save", count="3")],
    )


@pytest.mark.parametrize(
    "value",
    [
        "a </function>\n</tool_call> b",
        "</function></tool_call>",
        "<function=find></function>",
        "<tool_call>\n<function=find>\n</function>",
    ],
)
def test_closing_tags_in_a_parameter_are_its_text(value: str, read: Read) -> None:
    text = (
        f"<tool_call>\n<function=save>\n<parameter=text>\n{value}\n</parameter>\n"
        "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    made = call("save", text=value, count=3)
    assert read("qwen_xml", f"Hm.\n{text}\n{text}") == ("Hm.", [made, made])


def test_a_function_in_tags_needs_no_parameters(read: Read) -> None:
    for space in ("", "\n"):
        text = f"<tool_call>{space}<function=find>{space}</function>{space}</tool_call>"
        assert read("qwen_xml", text) == ("", [call()])


def test_several_calls_without_markup_are_told_apart(read: Read) -> None:
    one = '{"name": "find", "parameters": {"a": "}; {"}}'
    two = '{"type": "function", "name": "save", "parameters": {}}'
    calls = [call(a="}; {"), call("save")]
    for separator in ("; ", ";", "\n", "\n\n", ""):
        assert read("llama3", f"{one}{separator}{two}") == ("", calls)
    assert read("llama3", f"<|python_tag|>{one}; {two}") == ("", calls)
    assert read("llama3", f"{one}\nI hope this helps.") == ("\nI hope this helps.", calls[:1])
    assert read("llama3", f'{one}; {{"a": 1}}') == ('; {"a": 1}', calls[:1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"name": "find", "parameters": {"a": [1, "}"]}}'),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"a": [1, "}"]}'),
        ("mistral_list", '[TOOL_CALLS] [{"name": "find", "arguments": {"a": [1, "}"]}}]'),
    ],
)
def test_calls_without_a_closing_end_with_their_last_bracket(
    name: str, text: str, forms: Forms
) -> None:
    parser = CallParser(forms(name), TOOLS)
    assert parser.push(text[:-1]) == ("", [])
    assert parser.push(text[-1]) == ("", [call(a=[1, "}"])])
    assert parser.push(" More.") == (" More.", [])


@pytest.mark.parametrize(
    "text",
    ['{"name": "Ada", "a', '{"name": 5', '{"type": "o', '{"name": [', "[TOOL_CALLS]find[ARGS]n"],
)
def test_text_is_given_away_as_soon_as_it_cannot_be_a_call(text: str, forms: Forms) -> None:
    parser = CallParser(forms("mistral" if "ARGS" in text else "llama3"), TOOLS)
    assert parser.push(text[:-1]) == ("", [])
    assert parser.push(text[-1]) == (text, [])


@pytest.mark.parametrize("name", [*NATIVE, "qwen_xml"])
def test_little_white_space_waits_for_a_call(name: str, forms: Forms) -> None:
    parser = CallParser(forms(name), TOOLS)
    shown = "".join(parser.push(piece)[0] for piece in ["Hi", *("\n" * 200)])
    assert shown == "Hi" + "\n" * 192
    assert parser.push("you")[0] == "\n" * 8 + "you"
    parser = CallParser(forms(name), TOOLS)
    assert len("".join(parser.push("\n")[0] for _ in range(200))) == 192


def test_white_space_around_calls_does_not_depend_on_the_pieces(read: Read) -> None:
    one, many = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>', "\n" * 200
    assert read("hermes", f"Hi{many}{one}") == ("Hi" + "\n" * 192, [call()])
    assert read("hermes", f"{one}{many}{one}") == ("\n" * 192, [call(), call()])
    assert read("hermes", f"{one}{many}") == (many, [call()])
    assert read("hermes", f"{one}{many[:8]}") == ("", [call()])


def test_calls_in_the_reasoning_are_thoughts(read: Read) -> None:
    made = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    assert read("qwen3", f"<think>\n{made}</think>\n\n{made}") == (
        f"<think>\n{made}</think>",
        [call()],
    )
    opened = "<|im_start|>assistant\n<think>\n"
    assert read("qwen3", f"{made}</think>\n\n{made}", opened) == (f"{made}</think>", [call()])
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert read("qwen3", made, closed) == ("", [call()])
    assert read("qwen3", f"a <think> that never ends {made}") == (
        f"a <think> that never ends {made}",
        [],
    )
    assert read("hermes", f"<think>\n{made}") == ("<think>", [call()])


def test_well_formed_output_reads_as_transformers_reads_it(forms: Forms) -> None:
    text = syntax_of(forms("hermes")).write([("find", {"a": 1}), ("save", {"text": "b"})])
    message = parse_response(text, dict(forms("hermes").response_template), prefix="")
    expected = [call["function"] for call in message["tool_calls"]]
    assert [
        {"name": made.name, "arguments": json.loads(made.arguments)}
        for made in parse(forms("hermes"), text)[1]
    ] == expected


def test_a_response_template_of_the_tokenizer_is_followed(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = {
        "start_anchor": "<|turn>model\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<\|start\|>call:(?P<name>\w+)",
                "close": "<|end|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [["<|q|>", "<|q|>"]]},
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": ["<|eot|>"], "content": "text"},
        },
    }
    tokenizer = build("byte_level", "chatml")
    monkeypatch.setattr(tokenizer, "response_template", template, raising=False)
    form = native_format("something new", tokenizer)
    assert form is not None
    assert (form.syntax, form.markers) == (None, {"<|start|>", "<|end|>"})
    for size in SIZES:
        assert parse(form, "a <|start|>call:save{text:<|q|>b<|q|>}<|end|>", size) == (
            "a",
            [call("save", text="b")],
        )


def test_long_arguments_in_small_pieces_are_read(forms: Forms) -> None:
    text = '</tool_call>\\"\n' * 8_000
    for name in ("hermes", "mistral"):
        whole = syntax_of(forms(name)).write([("save", {"text": text, "n": list(range(9_000))})])
        assert parse(forms(name), whole, 3) == (
            "",
            [call("save", text=text, n=list(range(9_000)))],
        )
