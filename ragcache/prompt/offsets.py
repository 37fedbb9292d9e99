"""Where tokens lie in the text that they are, told by their bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from ragcache.prompt.vocabulary import Vocabulary


class ByteOffsets:
    """Offsets of the tokens of byte-level BPE in a text, without encoding it again.

    They are exact, and None wherever the bytes of the tokens are not those of the text, as after
    a normalizer that changes it; and for other tokenizers, which put spaces in front of a text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._is_known = vocabulary.is_byte_level
        self._token_bytes = vocabulary.token_bytes

    def count_within(self, text: str, ids: Sequence[int], ends: Sequence[int]) -> list[int] | None:
        """How many of its tokens lie within the first `end` characters, for ascending ends.

        Counted from behind, because a content mostly ends where its text does, or nearly.
        """
        if not self._is_known:
            return None
        stretches = [text[start:end].encode() for start, end in pairwise([*ends, len(text)])]
        tail = b"".join(stretches)
        last = self._read(reversed(ids), len(tail))
        if not b"".join(reversed(last)).endswith(tail):
            return None
        sizes = list(accumulate(map(len, last), initial=0))
        behind = accumulate(map(len, reversed(stretches)))  # bytes behind each end, last one first
        return [len(ids) - bisect_left(sizes, size) for size in behind][::-1]

    def find_character(self, text: str, ids: Sequence[int], token: int) -> int | None:
        """The character with which a token begins: the one that its first byte is a part of."""
        if not self._is_known:
            return None
        head = b"".join(map(self._token_bytes, ids[:token]))
        return len(head.decode(errors="ignore")) if text.encode().startswith(head) else None

    def _read(self, ids: Iterable[int], num_bytes: int) -> list[bytes]:
        """The bytes of as many tokens as it takes for `num_bytes`."""
        read: list[bytes] = []
        for id in ids:
            if num_bytes <= 0:
                break
            read.append(self._token_bytes(id))
            num_bytes -= len(read[-1])
        return read
