"""Text to tool calls, as it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regex
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplateField,
    load_response_template,
)

from ragcache.prompt.tool_format import ToolFormat, write_arguments
from ragcache.types import ToolCall

_CALLS = "tool_calls"
_IN_STRING = regex.compile(r'(?:[^"\\]++|\\.)*+', regex.DOTALL)
_BRACKET = regex.compile(r'(?P<quote>")|[\[\]{}]')
_NEXT_ENTRY = regex.compile(r"\s*[\[,]\s*")
_PREFIX_END = 100  # characters; the markup that opens the reasoning is shorter
_MAX_SPACE = 8  # characters of white space that wait for a call


class CallReader:
    """Reads the markup of calls that is complete, as a format's response template says."""

    def __init__(self, format: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> None:
        template = format.response_template
        call = template["fields"][_CALLS]
        # Without its closing the field extends to the end of what is to be read.
        open_ended = {key: call[key] for key in call if key not in ("close", "close_pattern")}
        self._template = {**template, "fields": {_CALLS: open_ended}}
        self._names = {tool["function"]["name"] for tool in tools}
        # JSON has types already; casting would turn the string "5" into a number.
        self._tools = None if call.get("content") == "json" else list(map(dict, tools))

    def read(self, markup: str) -> list[ToolCall] | None:
        """The calls in `markup`; None when it holds anything else."""
        try:
            message = parse_response(markup, self._template, prefix="", tools=self._tools)
            return [self._call(value["function"]) for value in _flat(message.get(_CALLS, []))]
        # Everything that malformed JSON, other JSON, or the transform of it can raise.
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def read_cut(self, markup: str, content: int) -> tuple[list[ToolCall] | None, int]:
        """The calls in a list that begins at `content` and was cut off, and where they end."""
        end, decoder = content, json.JSONDecoder()
        while comma := _NEXT_ENTRY.match(markup, end):
            try:
                _, end = decoder.raw_decode(markup, comma.end())
            except (ValueError, RecursionError):
                break
        return (self.read(markup[:end] + "]") if end > content else None), end

    def _call(self, function: Mapping[str, Any]) -> ToolCall:
        name, arguments = function["name"], function["arguments"]
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError(f"{name} is no tool, or its arguments are no object")
        text = write_arguments(arguments)
        text.encode()  # raises for a lone surrogate, which no client could receive
        return ToolCall(name, text)


class CallParser:
    """Splits the output of one choice into text and calls, however it is cut into pieces.

    What counts as a call, and how to read it, is the format's response template; reading is
    transformers' work. Its own streaming parser does not do here: it ends a call at the first
    closing tag, also at one inside a JSON string, and a call that it cannot read is an error
    whose text is lost. So this class finds where calls begin and end, and gives them away whole.

    What is no complete call of one of the `tools` stays text, and so does all that stands in the
    model's reasoning. A little white space directly before a call, or after the last one, is
    dropped. Of a list that was cut off at the end, the complete calls count.
    Everything is scanned once, also long arguments in small pieces.
    """

    def __init__(
        self, format: ToolFormat, tools: Sequence[Mapping[str, Any]], *, prefix: str = ""
    ) -> None:
        """`prefix` is the prompt, whose end may have opened the reasoning already."""
        fields = load_response_template(dict(format.response_template)).fields
        self._regions = [field for field in fields.values() if _is_region(field)]
        self._closings = {field.name: _closing(field) for field in self._regions}
        self._is_json = _is_json(fields[_CALLS])
        self._is_list = self._is_json and fields[_CALLS].transform_each
        self._reader = CallReader(format, tools)
        self._text = ""
        self._shown = 0  # characters that were returned, or read as calls
        self._scanned = 0  # characters
        self._in_string = False  # whether what was scanned ends inside a JSON string
        self._region = next((f for f in self._regions if _is_open(f, prefix)), None)
        self._start = self._content = 0  # of the region, with and without its opening
        self._depth = 0  # of brackets, in JSON that has no closing
        self._call_end = -1  # of the last call

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; return the text that is now certain, and the calls that are complete."""
        self._text += text
        return self._read(final=False)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return what was kept back: a call that needs no closing, or else text."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> tuple[str, list[ToolCall]]:
        texts: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if self._region is None:
                if not self._enter(final):
                    break
                texts.append(self._take(self._start))
            else:
                end = self._find_end(final)
                if end is None:
                    break
                calls += self._leave(*end, final)
        texts.append(self._take_rest(final))
        return "".join(texts), calls

    def _enter(self, final: bool) -> bool:
        """Go to the next opening; if there is none yet, to where one may begin."""
        hold, found = len(self._text), None
        for field in self._regions:
            match = field.open_re.search(self._text, self._scanned, partial=not final)
            if match is None:
                continue
            if match.partial:
                hold = min(hold, match.start())
            elif found is None or match.start() < found[0].start():
                found = match, field
        if found is None or found[0].start() >= hold:
            self._scanned = hold
            return False
        match, self._region = found
        self._start, self._scanned, self._in_string = match.start(), match.end(), False
        self._content, self._depth = match.end(), 0
        return True

    def _leave(self, content_end: int, end: int, final: bool) -> list[ToolCall]:
        """Go behind the present region; return its calls, if that is what it holds."""
        calls, calls_end = None, end
        if self._region is not None and self._region.name == _CALLS:
            markup = self._text[self._start : content_end]
            calls = self._reader.read(markup)
            if calls is None and self._is_list and final and content_end == len(self._text):
                calls, length = self._reader.read_cut(markup, self._content - self._start)
                calls_end = self._start + length
        if calls is not None:
            self._shown = self._call_end = calls_end
        self._region, self._scanned = None, end
        return calls or []

    def _find_end(self, final: bool) -> tuple[int, int] | None:
        """Where the present region's content and its closing end."""
        assert self._region is not None
        closing = self._closings[self._region.name]
        while closing and self._leave_string():
            match = closing.search(self._text, self._scanned, partial=not final)
            if match is None or match.partial:
                self._scanned = match.start() if match else len(self._text)
                break
            self._scanned = match.end()
            if match.groupdict().get("quote") is not None:
                self._in_string = True
            elif closing is not _BRACKET:
                return match.start(), match.end()
            elif self._is_balanced(match[0]):
                return match.end(), match.end()
        # JSON shows by itself whether it is complete.
        is_end = final and self._region.name == _CALLS and (self._is_json or not closing)
        return (len(self._text), len(self._text)) if is_end else None

    def _is_balanced(self, bracket: str) -> bool:
        """Whether this bracket ends the JSON that the region holds."""
        self._depth += 1 if bracket in "{[" else -1
        return self._depth <= 0

    def _leave_string(self) -> bool:
        """Whether the scan stands outside of JSON strings, after going to the end of this one."""
        if self._in_string:
            self._scanned = _IN_STRING.match(self._text, self._scanned).end()
            if self._text.startswith('"', self._scanned):
                self._scanned, self._in_string = self._scanned + 1, False
        return not self._in_string

    def _take(self, end: int) -> str:
        """Text up to `end`; the last of its white space waits for what follows."""
        text = self._text[self._shown : end]
        space = len(text) - len(text.rstrip())
        text = text[: len(text) - min(space, _MAX_SPACE)]
        self._shown += len(text)
        return text

    def _take_rest(self, final: bool) -> str:
        if not final:
            is_call = self._region is not None and self._region.name == _CALLS
            return "" if is_call else self._take(self._scanned)
        text = self._take(len(self._text))
        rest = "" if self._shown == self._call_end else self._text[self._shown :]
        self._shown = len(self._text)
        return text + rest


def _is_region(field: ResponseTemplateField) -> bool:
    return field.open_re is not None and (field.name == _CALLS or field.close_re is not None)


def _is_json(field: ResponseTemplateField) -> bool:
    return field.content == "json" and not field.content_args


def _closing(field: ResponseTemplateField) -> Any:
    """The pattern of a closing; in JSON, also of the quote that starts a string.

    JSON without a closing ends with its last bracket.
    """
    if not _is_json(field):
        return field.close_re
    if field.close_re is None:
        return _BRACKET
    return regex.compile(f'(?P<quote>")|(?:{field.close_re.pattern})', regex.DOTALL)


def _is_open(field: ResponseTemplateField, prefix: str) -> bool:
    pattern = rf"(?:{field.open_re.pattern})\s*\Z"
    return field.name != _CALLS and bool(regex.search(pattern, prefix[-_PREFIX_END:], regex.DOTALL))


def _flat(value: Any) -> Iterator[Any]:
    """The entries of lists in lists."""
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from _flat(item)
