"""Text to token ids, and where in the text the tokens end."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from ragcache.prompt.control import ControlTokens, unescape
from ragcache.prompt.memo import EncodingMemo

_PROBES = ("a b", " a ", "\n\na", "  ", "e\u0301\n", "1\t2 ", "中 文", "'s \r\n", "▁a")


class Piece(NamedTuple):
    """A stretch of a rendered prompt that is encoded on its own."""

    marked: str  # as it stands in the rendering
    text: str
    ids: Sequence[int]
    anchor: str | None = None  # what stood before `text` when it was encoded; None: a control token


class Encoder:
    """Encodes rendered prompts with one tokenizer, which nothing changes after construction.

    That makes it safe for several threads at once. Text goes through the batch call also when it
    is a single one: only that call releases the interpreter while it works.

    What stands between two special tokens is encoded independently of the rest, so encodings
    of these pieces are remembered: a growing conversation costs only its new messages. That does
    not hold where something treats the start of a text differently from its middle, which is
    tried out at construction; then a prompt is a single piece.
    """

    def __init__(self, tokenizer: Tokenizer, control: ControlTokens, template_text: str) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._remembered = EncodingMemo(self._encode)
        self._remembered_spans = EncodingMemo(self._encode_spans, max_bytes=8 << 20)
        self._anchors = [(anchor, self._encode(anchor)) for anchor in ("\n", "a")]
        self._data_ids = {"": (), **self._encode_as_data()}
        self._border_ids = self._find_borders(template_text)
        self._borders = re.compile(f"({'|'.join(map(re.escape, self._border_ids)) or '(?!)'})")

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of plain text: special tokens in it are parsed, BOS is added as usual."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids

    def find_raw_character(self, text: str, token: int) -> int:
        """The character at which a token of `encode_raw(text)` begins."""
        return _start(self._encode_spans(text, add_special_tokens=True), token) if token else 0

    def pieces(self, rendered: str) -> list[Piece]:
        """Encode a rendered chat prompt; marked control tokens become ordinary text."""
        return list(self._cut(rendered))

    def count_tokens(self, pieces: Iterable[Piece], ends: Iterable[int]) -> list[int]:
        """How many tokens lie within the first `end` characters of the rendering, for each end.

        `ends` ascend. A token that reaches across an end belongs to what follows: it depends on it.
        """
        rest = iter(pieces)
        piece, start, tokens = next(rest, None), 0, 0
        counts = []
        for end in ends:
            while piece and start + len(piece.marked) <= end:
                start, tokens = start + len(piece.marked), tokens + len(piece.ids)
                piece = next(rest, None)
            counts.append(tokens + (self._count_within(piece, end - start) if piece else 0))
        return counts

    def find_character(self, pieces: Iterable[Piece], token: int) -> int:
        """The character of the text with which a token begins; behind the last token, its length.

        Tokens that share a character all begin with it, as do those of a control token that is
        data: its first one is theirs.
        """
        start = 0
        for piece in pieces:
            if token < len(piece.ids):
                return start + self._start_within(piece, token)
            start, token = start + len(piece.text), token - len(piece.ids)
        return start

    def _count_within(self, piece: Piece, end: int) -> int:
        if piece.anchor is None or not end:
            return 0
        spans = self._spans(piece)
        length = len(piece.anchor) + len(unescape(piece.marked[:end]))
        return bisect_right(range(len(piece.ids)), length, key=lambda token: spans[2 * token + 1])

    def _start_within(self, piece: Piece, token: int) -> int:
        if piece.anchor is None or not token:
            return 0
        return _start(self._spans(piece), token) - len(piece.anchor)

    def _spans(self, piece: Piece) -> Sequence[int]:
        """Start and end of each token of a piece, in one row; the anchor counts too."""
        spans = self._remembered_spans((piece.anchor or "") + piece.text)
        return spans[len(spans) - 2 * len(piece.ids) :]

    def _cut(self, rendered: str) -> Iterator[Piece]:
        inside = False  # whether text goes on, although it is cut here
        for part in self._control.split(rendered):
            if part.is_data:
                inside = True
                yield Piece(part.marked, part.text, self._data_ids[part.text])
                continue
            for marked in filter(None, self._borders.split(part.marked)):
                if (border := self._border_ids.get(marked)) is not None:
                    inside = False
                    yield Piece(marked, marked, [border])
                else:
                    yield self._encode_piece(marked, inside)

    def _encode_piece(self, marked: str, inside: bool) -> Piece:
        text, encode = unescape(marked), self._remembered
        anchor, ids = self._encode_inside(encode, text) if inside else ("", encode(text))
        return Piece(marked, text, ids, anchor)

    def _encode_inside(
        self, encode: Callable[[str], Sequence[int]], text: str
    ) -> tuple[str, Sequence[int]]:
        """Encode `text` as it reads in the middle of a text; with what was put in front for that.

        SentencePiece-like tokenizers put a space in front of a text. With something else in
        front they do not, and where that stays a token of its own it can be taken off again.
        """
        for anchor, anchor_ids in self._anchors:
            ids = encode(anchor + text)
            if list(ids[: len(anchor_ids)]) == anchor_ids:
                return anchor, ids[len(anchor_ids) :]
        return "", encode(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_spans(self, text: str, add_special_tokens: bool = False) -> list[int]:
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return [place for span in encoding.offsets for place in span]

    def _encode_as_data(self) -> dict[str, Sequence[int]]:
        """Ids of each control token read as ordinary text."""
        tokens = self._control.tokens
        control_ids = {self._tokenizer.token_to_id(token) for token in tokens}
        self._tokenizer.encode_special_tokens = True  # that is: as text
        ids = {token: self._encode_inside(self._encode, token)[1] for token in tokens}
        # Other added tokens are still found, and a model that has control tokens in its own
        # vocabulary finds those; neither happens in single characters.
        for token in tokens:
            if not control_ids.isdisjoint(ids[token]):
                chars = (self._encode_inside(self._encode, char)[1] for char in token)
                ids[token] = [id for char_ids in chars for id in char_ids]
        self._tokenizer.encode_special_tokens = False
        return ids

    def _find_borders(self, template_text: str) -> dict[str, int]:
        """The special tokens of the template at which a prompt may be cut, with their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        contents = [token.content for token in added.values()]
        borders = {
            token.content: id
            for id, token in added.items()
            if token.content in template_text
            and token.special
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            and not any(_may_swallow(other, token.content) for other in contents)
        }
        return borders if all(map(self._cuts_cleanly, borders.items())) else {}

    def _cuts_cleanly(self, border: tuple[str, int]) -> bool:
        token, id = border
        return all(
            self._encode(left + token + right) == [*self._encode(left), id, *self._encode(right)]
            for left, right in zip(_PROBES, reversed(_PROBES), strict=True)
        )


def _start(spans: Sequence[int], token: int) -> int:
    """The character at which a token begins; what no token covers counts to the next one."""
    return min(spans[2 * token - 1 : 2 * token + 1])


def _may_swallow(other: str, token: str) -> bool:
    """Whether `other` could win a match against `token` by starting earlier or being longer."""
    return other != token and (token[0] in other[1:] or other.startswith(token))
