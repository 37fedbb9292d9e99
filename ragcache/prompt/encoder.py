"""Text to token ids, and where in the text the tokens end."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from tokenizers import Tokenizer

from ragcache.prompt.control import ControlTokens, unescape
from ragcache.prompt.memo import EncodingMemo
from ragcache.prompt.offsets import ByteOffsets
from ragcache.prompt.vocabulary import Vocabulary

Encode = Callable[[str], Sequence[int]]

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
    tried out at construction; then a prompt is a single piece. They are remembered in scopes: what
    was encoded in one is of no use, and so not noticed, in another.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        control: ControlTokens,
        template_text: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._offsets = ByteOffsets(vocabulary)
        self._remembered = EncodingMemo(self._encode)
        self._remembered_spans = EncodingMemo(self._encode_spans, max_bytes=8 << 20)
        added = tokenizer.encode("a").special_tokens_mask
        self._num_added = sum(takewhile(bool, added))  # in front of raw text
        self._anchors = [(anchor, self._encode(anchor)) for anchor in ("\n", "a")]
        self._data_ids = {"": (), **self._encode_as_data()}
        self._border_ids = self._find_borders(template_text)
        self._borders = re.compile(f"({'|'.join(map(re.escape, self._border_ids)) or '(?!)'})")

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of plain text: special tokens in it are parsed, BOS is added as usual."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids

    def find_raw_character(self, text: str, ids: Sequence[int], token: int) -> int:
        """The character at which a token of `encode_raw(text)`, that is `ids`, begins."""
        ids, token = ids[self._num_added :], max(0, token - self._num_added)
        found = self._offsets.find_character(text, ids, token)
        return _start(self._encode_spans(text), token) if found is None else found

    def pieces(self, rendered: str, scope: str = "") -> list[Piece]:
        """Encode a rendered chat prompt; marked control tokens become ordinary text."""
        return list(self._cut(rendered, partial(self._remembered, scope=scope)))

    def pieces_at_hand(self, rendered: str, new: int, scope: str = "") -> list[Piece] | None:
        """`pieces` where all but `new` characters are remembered, else None."""
        spare = new

        def look_up(text: str) -> Sequence[int]:
            nonlocal spare
            ids = self._remembered.peek(text, scope)
            if ids is None:
                spare -= len(text)
                return self._remembered(text, scope) if spare >= 0 else ()
            return ids

        pieces = list(self._cut(rendered, look_up))
        return pieces if spare >= 0 else None

    def count_tokens(
        self, pieces: Iterable[Piece], ends: Sequence[int], scope: str = ""
    ) -> list[int]:
        """How many tokens lie within the first `end` characters of the rendering, for each end.

        `ends` ascend. A token that reaches across an end belongs to what follows: it depends on it.
        """
        counts: list[int] = []
        start = tokens = 0
        for piece in pieces:
            stop = bisect_left(ends, start + len(piece.marked), len(counts))
            inside = [end - start for end in ends[len(counts) : stop]]
            counts += [tokens + count for count in self._count_within(piece, inside, scope)]
            start, tokens = start + len(piece.marked), tokens + len(piece.ids)
        return counts + [tokens] * (len(ends) - len(counts))

    def find_character(self, pieces: Iterable[Piece], token: int, scope: str = "") -> int:
        """The character of the text with which a token begins; behind the last token, its length.

        Tokens that share a character all begin with it, as do those of a control token that is
        data: its first one is theirs.
        """
        start = 0
        for piece in pieces:
            if token < len(piece.ids):
                return start + self._start_within(piece, token, scope)
            start, token = start + len(piece.text), token - len(piece.ids)
        return start

    def _count_within(self, piece: Piece, ends: Sequence[int], scope: str) -> list[int]:
        lengths = [len(unescape(piece.marked[:end])) for end in ends if end]
        if piece.anchor is None or not lengths:
            return [0] * len(ends)
        counts = self._offsets.count_within(piece.text, piece.ids, lengths)
        if counts is None:
            token_ends = self._spans(piece, scope)[1::2]
            counts = [bisect_right(token_ends, len(piece.anchor) + length) for length in lengths]
        return [0] * (len(ends) - len(counts)) + counts

    def _start_within(self, piece: Piece, token: int, scope: str) -> int:
        if piece.anchor is None or not token:
            return 0
        found = self._offsets.find_character(piece.text, piece.ids, token)
        if found is None:
            return _start(self._spans(piece, scope), token) - len(piece.anchor)
        return found

    def _spans(self, piece: Piece, scope: str) -> Sequence[int]:
        """Start and end of each token of a piece, in one row; the anchor counts too."""
        spans = self._remembered_spans((piece.anchor or "") + piece.text, scope)
        return spans[len(spans) - 2 * len(piece.ids) :]

    def _cut(self, rendered: str, encode: Encode) -> Iterator[Piece]:
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
                    yield self._encode_piece(encode, marked, inside)

    def _encode_piece(self, encode: Encode, marked: str, inside: bool) -> Piece:
        text = unescape(marked)
        anchor, ids = self._encode_inside(encode, text) if inside else ("", encode(text))
        return Piece(marked, text, ids, anchor)

    def _encode_inside(self, encode: Encode, text: str) -> tuple[str, Sequence[int]]:
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

    def _encode_spans(self, text: str) -> list[int]:
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
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
    token = min(token, len(spans) // 2)  # tokens that are added at the end begin there
    return min(spans[2 * token - 1 : 2 * token + 1]) if token else 0


def _may_swallow(other: str, token: str) -> bool:
    """Whether `other` could win a match against `token` by starting earlier or being longer."""
    return other != token and (token[0] in other[1:] or other.startswith(token))
