"""How models write tool calls: what the grammar allows and what the parser reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The exact text around the calls of one output.

    begin, then for each call `head` NAME `middle` ARGUMENTS `tail`, with `separator` between two
    of them, then end. NAME is JSON-escaped text without quotes, ARGUMENTS a JSON object with
    ", " and ": " between its parts, as templates print it.
    `separator` None: this model makes one call at a time.
    """

    head: str
    middle: str
    tail: str
    begin: str = ""
    separator: str | None = None
    end: str = ""

    @property
    def trigger(self) -> str:
        """What free text must not contain, or a call begins: the opening up to the first name."""
        return self.begin + self.head

    def write(self, calls: Iterable[tuple[str, Any]]) -> str:
        """The text of some calls, each a name and its arguments."""
        texts = (self._write(name, arguments) for name, arguments in calls)
        return self.begin + (self.separator or "").join(texts) + self.end

    def opening(self, name: str) -> str:
        """The text of a first call up to its arguments."""
        return self.begin + self._write_name(name)

    def _write(self, name: str, arguments: Any) -> str:
        return self._write_name(name) + write_arguments(arguments) + self.tail

    def _write_name(self, name: str) -> str:
        return self.head + json.dumps(name, ensure_ascii=False)[1:-1] + self.middle


def write_arguments(arguments: Any) -> str:
    """Arguments as JSON text, the way the filter `tojson` of chat templates prints them.

    With this, a call that comes back in the history has the tokens that the model generated.
    Raises ValueError for NaN and infinity, which JSON does not have.
    """
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The form in which one model makes tool calls.

    `response_template` is transformers' declaration for its `ResponseParser`; its field
    `tool_calls` tells where calls begin and end and how to read them. `syntax` None: this form is
    no sequence of JSON texts, a grammar cannot enforce it. `markers` are the special tokens in
    it, which must be part of the text that is parsed.
    """

    syntax: CallSyntax | None
    response_template: Mapping[str, Any]
    markers: frozenset[str] = frozenset()


HERMES = CallSyntax(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
)
SMOLLM2 = CallSyntax(
    '{"name": "',
    '", "arguments": ',
    "}",
    begin="<tool_call>[",
    separator=", ",
    end="]</tool_call>",
)
LLAMA3 = CallSyntax('{"name": "', '", "parameters": ', "}")
MISTRAL_LIST = CallSyntax(
    '{"name": "', '", "arguments": ', "}", begin="[TOOL_CALLS] [", separator=", ", end="]"
)
MISTRAL = CallSyntax("[TOOL_CALLS]", "[ARGS]", "", separator="")


def _format(syntax: CallSyntax | None, call: Any, **field: Any) -> ToolFormat:
    """A form whose calls read as `call`, a transform of the response template."""
    field = {"content": "json", "transform": {"type": "function", "function": call}, **field}
    # The anchor is where the library would start to read a prompt; it reads none here.
    return ToolFormat(syntax, {"start_anchor": "assistant", "fields": {"tool_calls": field}})


_ENTRY = {"name": "{name}", "arguments": "{arguments}"}

# What must follow the opening keeps a mention of the markup from being taken for a call.
_HERMES = _format(
    HERMES, "{content}", open_pattern=r"<tool_call>(?=\s*\{)", close="</tool_call>", repeats=True
)
_SMOLLM2 = _format(
    SMOLLM2,
    _ENTRY,
    open_pattern=r"<tool_call>(?=\s*\[)",
    close="</tool_call>",
    transform_each=True,
)
_LLAMA3 = _format(
    LLAMA3,
    {"name": "{content.name}", "arguments": "{content.parameters}"},
    # A second call follows the first, with or without a semicolon.
    open_pattern=r"(?:(?:\A|(?<=\}))[\s;]{0,8}|<\|python_tag\|>\s{0,8})"
    r'(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    r'"name"\s*:\s*"(?:[^"\\]|\\.){1,200}"\s*,\s*"parameters"\s*:\s*\{)',
)
_MISTRAL_LIST = _format(
    MISTRAL_LIST, _ENTRY, open_pattern=r"\[TOOL_CALLS\](?=\s*\[)", transform_each=True
)
_MISTRAL = _format(
    MISTRAL,
    {"name": "{name}", "arguments": "{content}"},
    open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?\[ARGS\]"
    r"(?=\s*\{)",
    repeats=True,
)
_QWEN_XML = _format(
    None,
    {"name": "{name}", "arguments": "{content}"},
    open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    # Not inside of a parameter.
    close_pattern=r"</function>(?<=(?:</parameter>|<function=[^>\n]+>)\s*</function>)\s*</tool_call>",
    repeats=True,
    content="xml-inline",
    # What is neither a parameter nor white space has no key, which is an error.
    content_args={
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>|\S"
    },
)

# The first form of which a chat template has all strings is its model's.
_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat | None], ...] = (
    (("<arg_key>",), None),  # keys and values in turn (GLM): no parser of the library reads it
    (("<tool_call>", "<function="), _QWEN_XML),
    (("<tool_call>", "arguments"), _HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL),
    (("[TOOL_CALLS]",), _MISTRAL_LIST),
    (('"parameters": ', "ipython"), _LLAMA3),
)
_REASONING = {"open": "<think>", "close": "</think>"}


def native_format(source: str, tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """The form that a chat template with this source has taught its model; None: not known.

    A response template that comes with the tokenizer says best how to read it.
    """
    known = next((form for signs, form in _SIGNS if all(sign in source for sign in signs)), None)
    own = getattr(tokenizer, "response_template", None)
    if own and "tool_calls" in own.get("fields", {}):
        return _fitted(ToolFormat(known.syntax if known else None, own), source, tokenizer)
    return known and _fitted(known, source, tokenizer)


def adapted_format(source: str, tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """The form that the ToolAdapter asks for: the list that larger SmolLM2 models know."""
    return _fitted(_SMOLLM2, source, tokenizer)


def _fitted(form: ToolFormat, source: str, tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Add what depends on the model: its reasoning, where a call is only a thought, its markers."""
    fields = form.response_template["fields"]
    if "<think>" in source:
        fields = {"reasoning_content": _REASONING, **fields}
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    written = "\n".join(_strings(fields["tool_calls"])).replace("\\", "")  # of regular expressions
    markers = {token.content for token in added if token.special and token.content in written}
    return ToolFormat(form.syntax, {**form.response_template, "fields": fields}, frozenset(markers))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)
