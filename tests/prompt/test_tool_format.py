from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ragcache.prompt.template import ChatTemplate
from ragcache.prompt.tool_format import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_LIST,
    SMOLLM2,
    CallSyntax,
    ToolFormat,
    native_format,
)

Forms = Callable[[str], ToolFormat]


@pytest.mark.parametrize(
    ("name", "syntax"),
    [
        ("hermes", HERMES),
        ("qwen3", HERMES),
        ("qwen_xml", None),
        ("llama3", LLAMA3),
        ("mistral", MISTRAL),
        ("mistral_list", MISTRAL_LIST),
        ("smollm2", SMOLLM2),
    ],
)
def test_the_form_is_known_from_the_chat_template(
    name: str, syntax: CallSyntax | None, forms: Forms
) -> None:
    assert forms(name).syntax == syntax


def test_an_unknown_form_is_none_and_gets_the_adapters(
    forms: Forms, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forms("glm") is None
    tokenizer = build("byte_level", "hermes")
    source = tokenizer.chat_template.replace("<tool_call>", "<call>")
    monkeypatch.setattr(tokenizer, "chat_template", source)
    assert ChatTemplate(tokenizer).tool_format.syntax == SMOLLM2


@pytest.mark.parametrize(
    ("template", "syntax"),
    [("hermes", HERMES), ("llama3", LLAMA3), ("last_tools", MISTRAL_LIST), ("chatml", SMOLLM2)],
)
def test_a_chat_template_tells_its_form(template: str, syntax: CallSyntax, build: Any) -> None:
    assert ChatTemplate(build("byte_level", template)).tool_format.syntax == syntax


def test_the_adapters_form_stands_above_a_response_template_without_tools(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build("byte_level", "chatml")
    own = {"start_anchor": "a", "fields": {"tool_calls": {"open": "<call>", "content": "json"}}}
    monkeypatch.setattr(tokenizer, "response_template", own, raising=False)
    assert ChatTemplate(tokenizer).tool_format.syntax == SMOLLM2


def test_a_response_template_without_calls_does_not_hide_the_form(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build("byte_level", "hermes")
    own = {"start_anchor": "a", "fields": {"content": {}}}
    monkeypatch.setattr(tokenizer, "response_template", own, raising=False)
    assert "tool_calls" in ChatTemplate(tokenizer).tool_format.response_template["fields"]


def test_special_tokens_in_the_form_are_its_markers() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<s>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[/INST]"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    sources = {
        "'[TOOL_CALLS]' '[ARGS]'": {"[TOOL_CALLS]", "[ARGS]"},
        "'[TOOL_CALLS]'": {"[TOOL_CALLS]"},
        """ipython '"parameters": '""": {"<|python_tag|>"},
        "<tool_call> arguments": set(),
    }
    for source, markers in sources.items():
        form = native_format(source, wrapped)
        assert form is not None
        assert form.markers == markers


def test_calls_are_written_as_chat_templates_print_them() -> None:
    calls = [("f", {"é": ['"', 1]}), ('a"b', {})]
    assert HERMES.write(calls) == (
        '<tool_call>\n{"name": "f", "arguments": {"é": ["\\"", 1]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "a\\"b", "arguments": {}}\n</tool_call>'
    )
    assert SMOLLM2.write(calls) == (
        '<tool_call>[{"name": "f", "arguments": {"é": ["\\"", 1]}}, '
        '{"name": "a\\"b", "arguments": {}}]</tool_call>'
    )
    assert MISTRAL.write(calls[:1] * 2) == '[TOOL_CALLS]f[ARGS]{"é": ["\\"", 1]}' * 2
    for syntax in (HERMES, SMOLLM2, MISTRAL, MISTRAL_LIST, LLAMA3):
        assert syntax.write(calls[:1]).startswith(syntax.trigger + "f")
    with pytest.raises(ValueError, match="JSON"):
        HERMES.write([("f", {"a": float("nan")})])
