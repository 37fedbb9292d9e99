"""Control tokens inside a client's strings are data, never control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Unicode noncharacters: never assigned, so they are rare in text; where they do occur they are
# escaped themselves (OPEN becomes ESCAPE "0", and so on).
_OPEN, _CLOSE, _ESCAPE = _MARKERS = "\ufdd0\ufdd1\ufdd2"


class Part(NamedTuple):
    """A stretch of a rendered prompt: text to encode, or a control token that is data."""

    marked: str  # as it stands in the rendering
    text: str
    is_data: bool


class ControlTokens:
    """Marks control tokens in strings before templating, and finds the marks afterwards.

    A retrieved document may hold `<|im_end|>`. Once it is rendered, nothing tells that text from
    the template's own `<|im_end|>`, so it is marked before: a `hidden` token is replaced by its
    number, which no filter of the template can turn back into the token; a `visible` one, such
    as `</think>`, stays readable between the marks because templates search for it. Pairs of
    visible tags are what a model wraps its own output in, so an assistant's content keeps them.
    """

    def __init__(self, hidden: Iterable[str], visible: Iterable[str] = ()) -> None:
        self._hidden = tuple(dict.fromkeys(hidden))
        self._numbers = {token: str(number) for number, token in enumerate(self._hidden)}
        self._visible = tuple(dict.fromkeys(visible))
        marks = f"[{_MARKERS}]"
        self._find = re.compile(f"{marks}|{_any_of(self.tokens)}")
        tags = _paired_tags(self._visible)
        self._find_in_output = re.compile(f"{marks}|{_any_of(set(self.tokens) - tags)}")
        names = rf"\d+|{_any_of(self._visible)}"
        self._marked = re.compile(f"{_OPEN}({names}){_CLOSE}|[{_OPEN}{_CLOSE}]")

    @property
    def tokens(self) -> tuple[str, ...]:
        """All control tokens."""
        return self._hidden + self._visible

    def mark(self, text: str) -> str:
        """Mark every control token in a client's string."""
        return self._find.sub(lambda match: self._mark_one(match[0]), text)

    def mark_output(self, text: str) -> str:
        """Mark the control tokens in what a model wrote, except pairs of visible tags."""
        return self._find_in_output.sub(lambda match: self._mark_one(match[0]), text)

    def _mark_one(self, found: str) -> str:
        if found in _MARKERS:
            return f"{_ESCAPE}{_MARKERS.index(found)}"
        return f"{_OPEN}{self._numbers.get(found, found)}{_CLOSE}"

    def split(self, rendered: str) -> Iterator[Part]:
        """Cut a rendering of marked strings at the marks.

        String methods of the template can separate the two marks of a token; a lone mark is a
        part without text, so that what stands around it cannot join into a control token.
        """
        end = 0
        for match in self._marked.finditer(rendered):
            if match.start() > end:
                yield self._text(rendered[end : match.start()])
            yield Part(match[0], self._unmark_one(match), is_data=match[1] is not None)
            end = match.end()
        if end < len(rendered):
            yield self._text(rendered[end:])

    def unmark(self, rendered: str) -> str:
        """The rendering as the client and the template wrote it."""
        return "".join(part.text for part in self.split(rendered))

    def _text(self, marked: str) -> Part:
        return Part(marked, unescape(marked), is_data=False)

    def _unmark_one(self, match: re.Match[str]) -> str:
        name = match[1] or ""
        if not name.isdecimal():
            return name
        number = int(name)
        return self._hidden[number] if number < len(self._hidden) else ""


def unescape(marked: str) -> str:
    """Undo the escaping of the mark characters themselves."""
    return re.sub(f"{_ESCAPE}([012])", lambda match: _MARKERS[int(match[1])], marked)


def _any_of(tokens: Iterable[str]) -> str:
    """A regular expression for any of some tokens, preferring the longest."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


def _paired_tags(tokens: Iterable[str]) -> set[str]:
    known = set(tokens)
    closing = {tag for tag in known if tag.startswith("</") and f"<{tag[2:]}" in known}
    return closing | {f"<{tag[2:]}" for tag in closing}
