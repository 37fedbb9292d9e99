"""Token ids to text, as they come."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

from ragcache.prompt.vocabulary import Vocabulary


class Detokenizer(ABC):
    """Incremental decoding of one choice.

    What `push` and `finish` return, joined, is the decoding of all tokens at once, special ones
    left out; a character is never split, and no pushed text changes afterwards. The cost of a
    token does not grow with the text. (`tokenizers.decoders.DecodeStream` cannot do this: it has
    no `finish`, so a text that ends in an invalid or incomplete character loses its end, and it
    decodes everything again as long as the end is invalid.)
    """

    @staticmethod
    def of(vocabulary: Vocabulary, visible: Collection[str] = ()) -> Detokenizer:
        """A new detokenizer of the kind that the tokenizer needs.

        `visible` are special tokens that are text all the same, such as the marks of tool calls.
        """
        kind = ByteDetokenizer if vocabulary.is_byte_level else WindowDetokenizer
        return kind(vocabulary.showing(visible) if visible else vocabulary)

    @abstractmethod
    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that is now certain."""

    @abstractmethod
    def finish(self) -> str:
        """Return the rest of the text."""


class ByteDetokenizer(Detokenizer):
    """For byte-level tokenizers, whose text is the UTF-8 decoding of their tokens' bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; an incomplete character is kept back."""
        vocabulary = self._vocabulary
        kept = (id for id in token_ids if not vocabulary.is_skipped(id))
        return self._utf8.decode(b"".join(map(vocabulary.token_bytes, kept)))

    def finish(self) -> str:
        """Return U+FFFD for what is left of an incomplete character."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For all others: decode the last tokens with and without the new ones.

    Decoders treat the first token of a text specially, so the window keeps the tokens that
    brought the last text in front of the new ones.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        self._num_read = 0  # tokens of the window whose text is out already …
        self._read = ""  # … which is this

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; a run of byte tokens is kept back until it ends."""
        return "".join(self._push(id) for id in token_ids if not self._vocabulary.is_skipped(id))

    def finish(self) -> str:
        """Return the text of the tokens kept back."""
        return self._take()

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        return "" if self._vocabulary.is_byte(token_id) else self._take()

    def _take(self) -> str:
        text = self._vocabulary.decode(self._window)[len(self._read) :]
        if text:
            del self._window[: self._num_read]
            self._read = self._vocabulary.decode(self._window)
            self._num_read = len(self._window)
        return text
