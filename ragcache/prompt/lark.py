"""Grammars of outputs in llguidance's dialect of Lark (its docs/syntax.md, docs/json_schema.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from ragcache.prompt.tool_format import CallSyntax

_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # no \uXXXX: one form for each character, no surrogates
}
_ANY = "/(?s:.*)/"
_LEXEMES = re.compile(r'"(?:[^"\\]|\\.)*"|[:,] |[{}\[\]]|[^"{}\[\]:,]+|.', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonRule:
    """A JSON schema as part of a grammar; `param` is the field of the request it came from.

    Values are laid out as `json.dumps(value, ensure_ascii=False)` does it. With `lenient`, keywords
    and formats that the library knows no grammar for are ignored.
    """

    schema: Mapping[str, Any]
    param: str
    lenient: bool = False

    @property
    def text(self) -> str:
        """The schema with the library's options, as JSON."""
        options = {**_LAYOUT, "lenient": self.lenient}
        return json.dumps({**self.schema, "x-guidance": options})


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What an output may be: calls of `functions` (by name), JSON, or else, if `free`, text."""

    functions: Mapping[str, JsonRule]
    several_calls: bool
    json: JsonRule | None
    free: bool

    @property
    def rules(self) -> list[JsonRule]:
        """All schemas."""
        return [*self.functions.values(), *filter(None, [self.json])]


class LarkWriter:
    """Writes grammars for one syntax of calls and one tokenizer.

    To the library, added tokens that look like markup are not part of any text; a grammar has
    to name them by their ids. `marks` are these tokens (text to id): the syntax may hold any of
    them, free text those that are `visible`.
    """

    def __init__(
        self, syntax: CallSyntax, marks: Mapping[str, int], visible: Collection[str]
    ) -> None:
        self._syntax = syntax
        self._marks = marks
        longest_first = sorted(marks, key=len, reverse=True)
        self._find_mark = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        written = "\n".join(filter(None, astuple(syntax)))
        ids = sorted(marks[mark] for mark in visible if mark not in written)
        self._visible = f"<[{','.join(map(str, ids))}]>" if ids else ""
        mark = self._find_mark.search(syntax.trigger)
        self._ending = mark[0] if mark else syntax.trigger  # of free text

    def write(self, form: OutputForm) -> str:
        """A grammar, with the rule `start`."""
        starts, rules = [], []
        if form.json is not None:
            starts.append(f"%json {form.json.text}")
        elif form.free:
            starts.append("text")
            rules += self._text()
        if form.functions:
            starts.append("calls")
            rules += self._calls(form)
        return "\n".join([*self._options(form), f"start: {' | '.join(starts)}", *rules])

    def _options(self, form: OutputForm) -> Iterable[str]:
        """Forced tokens are the tokenizer's own for the text that must come.

        So a mark in a string of a schema would be forced as the token that no string may hold.
        """
        texts = [*form.functions, *(json.dumps(r.schema, ensure_ascii=False) for r in form.rules)]
        if any(map(self._find_mark.search, texts)):
            yield '%llguidance {"no_forcing": true}'

    def _text(self) -> list[str]:
        """Free text without the trigger."""
        more = f" | text {self._visible} TEXT?" if self._visible else ""
        without = f"~({_ANY} {json.dumps(self._ending)} {_ANY})"
        return [f"text: TEXT?{more}", f"TEXT: /(?s:.+)/ & {without}"]

    def _opening(self) -> list[str]:
        """Free text up to and with the trigger.

        Where a mark in the trigger ends the text, what stands before that is text as well.
        """
        trigger = self._syntax.trigger
        if mark := self._find_mark.search(trigger):
            return [f"opening: text {self._terms(trigger[mark.start() :])}"]
        more = f" | text {self._visible} ended" if self._visible else ""
        return [f"opening: ended{more}", f"ended[lazy]: {_ANY} {json.dumps(self._ending)}"]

    def _calls(self, form: OutputForm) -> list[str]:
        """Calls and, where there is free text, what leads up to them."""
        syntax = self._syntax
        names = [json.dumps(name, ensure_ascii=False)[1:-1] for name in form.functions]
        first, rules = f"{self._terms(syntax.begin)} call", []
        if form.free:
            first = "opening opened"  # the head of the first call is a part of the opening
            rules += self._opening()
            rules += self._alternatives("opened", [name + syntax.middle for name in names])
        more = ""
        if form.several_calls and syntax.separator is not None:
            more = f"({self._terms(syntax.separator)} call)*"
        return [
            f"calls: {first} {more} {self._terms(syntax.end)}",
            *rules,
            *self._alternatives("call", [syntax.head + name + syntax.middle for name in names]),
            *(
                f"arguments_{number}: %json {rule.text} {self._terms(syntax.tail)}"
                for number, rule in enumerate(form.functions.values())
            ),
        ]

    def _alternatives(self, rule: str, heads: Iterable[str]) -> Iterable[str]:
        bodies = [f"{self._terms(head)} arguments_{i}" for i, head in enumerate(heads)]
        yield f"{rule}: {' | '.join(bodies)}"

    def _terms(self, text: str) -> str:
        """Text of the syntax as literals and the ids of marks.

        The literals are cut where JSON is: the library's lexer takes the longest one that fits, and
        with `{"name": "` as one no JSON object could begin that way where a call can.
        """
        terms: list[str] = []
        for number, part in enumerate(self._find_mark.split(text)):
            if number % 2:
                terms.append(f"<[{self._marks[part]}]>")
            else:
                terms += map(json.dumps, _LEXEMES.findall(part))
        return " ".join(terms)
