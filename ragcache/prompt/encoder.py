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
    ids: Sequence[int]


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
        self._anchors = [(anchor, self._encode(anchor)) for anchor in ("\n", "a")]
        self._data_ids = {"": (), **self._encode_as_data()}
        self._border_ids = self._find_borders(template_text)
        self._borders = re.compile(f"({'|'.join(map(re.escape, self._border_ids)) or '(?!)'})")

    def encode_raw(self, text: str) -> list[int]:
        """Token ids of plain text: special tokens in it are parsed, BOS is added as usual."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat prompt; marked control tokens become ordinary text."""
        ids: list[int] = []
        for piece in self._pieces(rendered):
            ids.extend(piece.ids)
        return ids

    def count_tokens(self, rendered: str, ends: Iterable[int]) -> list[int]:
        """How many tokens lie within the first `end` characters, for each of ascending `ends`.

        A token that reaches across an end belongs to what follows: it depends on it.
        """
        pieces = self._pieces(rendered)
        piece, start, tokens = next(pieces, None), 0, 0
        counts = []
        for end in ends:
            while piece and start + len(piece.marked) <= end:
                start, tokens = start + len(piece.marked), tokens + len(piece.ids)
                piece = next(pieces, None)
            within = self._count_within(piece, end - start) if piece and end > start else 0
            counts.append(tokens + within)
        return counts

    def _count_within(self, piece: Piece, end: int) -> int:
        text = unescape(piece.marked)
        offsets = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].offsets
        count = bisect_right([last for _, last in offsets], len(unescape(piece.marked[:end])))
        return min(count, len(piece.ids))

    def _pieces(self, rendered: str) -> Iterator[Piece]:
        inside = False  # whether text goes on, although it is cut here
        for part in self._control.split(rendered):
            if part.is_data:
                inside = True
                yield Piece(part.marked, self._data_ids[part.text])
                continue
            for marked in filter(None, self._borders.split(part.marked)):
                if (border := self._border_ids.get(marked)) is not None:
                    inside = False
                    yield Piece(marked, [border])
                else:
                    yield Piece(marked, self._encode_piece(unescape(marked), inside))

    def _encode_piece(self, text: str, inside: bool) -> Sequence[int]:
        return self._encode_inside(self._remembered, text) if inside else self._remembered(text)

    def _encode_inside(self, encode: Callable[[str], Sequence[int]], text: str) -> Sequence[int]:
        """Encode `text` as it reads in the middle of a text.

        SentencePiece-like tokenizers put a space in front of a text. With something else in
        front they do not, and where that stays a token of its own it can be taken off again.
        """
        for anchor, anchor_ids in self._anchors:
            ids = encode(anchor + text)
            if list(ids[: len(anchor_ids)]) == anchor_ids:
                return ids[len(anchor_ids) :]
        return encode(text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_as_data(self) -> dict[str, Sequence[int]]:
        """Ids of each control token read as ordinary text."""
        tokens = self._control.tokens
        control_ids = {self._tokenizer.token_to_id(token) for token in tokens}
        self._tokenizer.encode_special_tokens = True  # that is: as text
        ids = {token: self._encode_inside(self._encode, token) for token in tokens}
        # Other added tokens are still found, and a model that has control tokens in its own
        # vocabulary finds those; neither happens in single characters.
        for token in tokens:
            if not control_ids.isdisjoint(ids[token]):
                chars = (self._encode_inside(self._encode, char) for char in token)
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


def _may_swallow(other: str, token: str) -> bool:
    """Whether `other` could win a match against `token` by starting earlier or being longer."""
    return other != token and (token[0] in other[1:] or other.startswith(token))
