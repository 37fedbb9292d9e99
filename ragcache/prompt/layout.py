"""Where the tokens of a prompt came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragcache.prompt.encoder import Encoder, Piece
from ragcache.prompt.segments import Outline, outline
from ragcache.prompt.template import ChatTemplate, Conversation
from ragcache.types import ChatPrompt, Segment


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """The named parts of a prompt, in order and without gaps, and the breakpoints in it.

    A breakpoint is the number of tokens before it; None where it has no place in the rendering.
    """

    segments: tuple[Segment, ...]
    breakpoints: tuple[int | None, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class TokenizedPrompt(ABC):
    """A prompt as the engine takes it, and the text that its tokens are."""

    token_ids: list[int]
    text: str

    def packed(self) -> Sequence[int]:
        """The token ids, as an array where they are at hand as one, which is quicker to pack."""
        return self.token_ids

    @abstractmethod
    def layout(self) -> PromptLayout:
        """The parts of the prompt.

        They are found when first asked for, which for a long conversation is work for a thread:
        it is rendered once more.
        """

    @abstractmethod
    def place(self, token: int) -> tuple[str, int]:
        """The segment of a token, and the character of the segment's content that it begins with.

        The characters count from the start of the client's string where that is rendered as it
        is, else (`tools`, calls, several system messages) from the start of the segment. Tokens
        of what the template writes before a content are at 0.
        """


@dataclass(frozen=True, eq=False, repr=False)
class PlainPrompt(TokenizedPrompt):
    """A prompt that was given as a whole, as text or as token ids."""

    find_character: Callable[[int], int]  # in the text, where a token begins

    def layout(self) -> PromptLayout:
        """A single part, `prompt`."""
        return PromptLayout((Segment("prompt", 0, len(self.token_ids)),))

    def place(self, token: int) -> tuple[str, int]:
        """The character of the text."""
        return "prompt", self.find_character(token)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as its template writes it, marks included."""

    prompt: ChatPrompt
    conversation: Conversation
    rendered: str


@dataclass(frozen=True, eq=False, repr=False)
class ChatTokens(TokenizedPrompt):
    """A rendered conversation, encoded."""

    chat: RenderedChat
    ids: array[int]
    pieces: list[Piece]
    template: ChatTemplate
    encoder: Encoder
    scope: str  # in which its pieces are remembered

    def packed(self) -> Sequence[int]:
        """See `TokenizedPrompt`."""
        return self.ids

    def layout(self) -> PromptLayout:
        """The parts that `segments.outline` finds."""
        return self._layout

    def place(self, token: int) -> tuple[str, int]:
        """The character of the client's string, if the segment ends with one."""
        segments = self._layout.segments
        number = bisect_right(segments[:-1], token, key=lambda segment: segment.end)
        character = self.encoder.find_character(self.pieces, token, self.scope)
        return segments[number].name, max(0, character - self._content_start(number))

    @cached_property
    def _outline(self) -> Outline:
        chat = self.chat
        return outline(self.template, chat.conversation, chat.prompt.breakpoints, chat.rendered)

    @cached_property
    def _layout(self) -> PromptLayout:
        parts, breakpoints = self._outline
        places = sorted({end for _, end, _ in parts} | {end for end in breakpoints if end})
        counts = self.encoder.count_tokens(self.pieces, places, self.scope)
        tokens = dict(zip(places, counts, strict=True))
        ends = [tokens[part.end] for part in parts]
        names = [part.name for part in parts]
        segments = tuple(map(Segment, names, [0, *ends[:-1]], ends))
        return PromptLayout(segments, tuple(end and tokens[end] for end in breakpoints))

    def _content_start(self, number: int) -> int:
        """The character of the text at which the content of a part starts."""
        _, end, message = self._outline.parts[number]
        if message is not None:
            content, end = self.chat.prompt.messages[message].content, self._num_characters(end)
            if self.text.endswith(content.strip(), 0, end):  # templates often trim
                return end - len(content.rstrip())
        return self._num_characters(self._outline.parts[number - 1].end) if number else 0

    def _num_characters(self, end: int) -> int:
        return len(self.template.control.unmark(self.chat.rendered[:end]))
