"""Control tokens inside a client's strings are data, never control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Unicode noncharacters: never assigned, so they are rare in text; where they do occur they are
# escaped themselves (OPEN becomes ESCAPE "0", and so on).
_RESERVED = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
_OPEN, _CLOSE, _ESCAPE = tuple(_RESERVED[:3])
PLACE_OPEN, PLACE_CLOSE = tuple(_RESERVED[3:])  # not written here: they mark places in a rendering
_ESCAPED = {ord(char): f"{_ESCAPE}{number}" for number, char in enumerate(_RESERVED)}
_FIND_ESCAPED = re.compile(f"{_ESCAPE}([0-{len(_RESERVED) - 1}])")


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
    as `</think>`, stays readable between the marks because templates search for it. Tags
    among these are what a model wraps its own output in, so they stay tokens in what it wrote.
    """

    def __init__(self, hidden: Iterable[str], visible: Iterable[str] = ()) -> None:
        self._hidden = tuple(dict.fromkeys(hidden))
        self._visible = tuple(dict.fromkeys(visible))
        self._names = {token: str(number) for number, token in enumerate(self._hidden)}
        self._names |= {token: token for token in self._visible}
        self._tokens = {name: token for token, name in self._names.items()}
        self._find = _finders(self.tokens)
        self._find_in_output = _finders(set(self.tokens) - _tags(self._visible))
        self._marked = re.compile(f"{_OPEN}({_any_of(self._tokens)}){_CLOSE}|[{_OPEN}{_CLOSE}]")

    @property
    def tokens(self) -> tuple[str, ...]:
        """All control tokens."""
        return self._hidden + self._visible

    def mark(self, text: str) -> str:
        """Mark every control token in a client's string."""
        return self._mark(self._find, text)

    def mark_output(self, text: str) -> str:
        """Mark the control tokens in what a model wrote, except visible tags."""
        return self._mark(self._find_in_output, text)

    def _mark(self, finders: Iterable[re.Pattern[str]], text: str) -> str:
        text = _escape(text)
        for finder in finders:
            text = finder.sub(lambda match: f"{_OPEN}{self._names[match[0]]}{_CLOSE}", text)
        return text

    def split(self, rendered: str) -> Iterator[Part]:
        """Cut a rendering of marked strings at the marks.

        String methods of the template can separate the two marks of a token; a lone mark is data
        without text, so that what stands around it cannot join into a control token.
        """
        if _OPEN not in rendered and _CLOSE not in rendered:
            yield Part(rendered, unescape(rendered), is_data=False)
            return
        end = 0
        for match in self._marked.finditer(rendered):
            if text := rendered[end : match.start()]:
                yield Part(text, unescape(text), is_data=False)
            yield Part(match[0], self._tokens.get(match[1], ""), is_data=True)
            end = match.end()
        if text := rendered[end:]:
            yield Part(text, unescape(text), is_data=False)

    def locate(self, marked: str, end: int) -> int:
        """Length of the part of a marked string that shows its first `end` characters.

        A control token that reaches across the end is left out.
        """
        length = 0
        for part in self.split(marked):
            if end < len(part.text):
                return length + (0 if part.is_data else len(_escape(part.text[:end])))
            end -= len(part.text)
            length += len(part.marked)
        return length

    def unmark(self, rendered: str) -> str:
        """The rendering as the client and the template wrote it."""
        return "".join(part.text for part in self.split(rendered))


def _escape(text: str) -> str:
    return text.translate(_ESCAPED) if any(map(text.__contains__, _RESERVED)) else text


def unescape(marked: str) -> str:
    """Undo the escaping of the mark characters themselves."""
    if _ESCAPE not in marked:
        return marked
    return _FIND_ESCAPED.sub(lambda match: _RESERVED[int(match[1])], marked)


def _any_of(tokens: Iterable[str]) -> str:
    """A regular expression for any of some tokens, preferring the longest."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


def _finders(tokens: Iterable[str]) -> list[re.Pattern[str]]:
    """Expressions that find the tokens; one for each first character, which makes them fast."""
    by_start: dict[str, list[str]] = {}
    for token in tokens:
        by_start.setdefault(token[0], []).append(token)
    return [re.compile(_any_of(group)) for _, group in sorted(by_start.items())]


def _tags(visible: Iterable[str]) -> set[str]:
    """Closing tags like `</think>`, and the tags that they close."""
    closing = {token for token in visible if token.startswith("</")}
    return closing | {f"<{token[2:]}" for token in closing}.intersection(visible)
