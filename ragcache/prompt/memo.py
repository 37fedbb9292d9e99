"""Encodings that are worth remembering."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

_ENTRY_OVERHEAD = 250  # bytes of one entry besides strings and ids: key, array header, links, slot
_MAX_SHARE = 8  # an entry takes at most this part of the memo: one text must not empty it


class EncodingMemo:
    """The most recently used results of `encode`, up to a number of bytes.

    A result is only found again in the scope that it was made in. Whoever is in another one
    cannot tell from the time that it takes whether a text was encoded before.

    Safe to use from several threads; two that miss the same text at once both encode it.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], max_bytes: int = 32 << 20) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = Lock()

    def __call__(self, text: str, scope: str = "") -> Sequence[int]:
        """Token ids of `text`."""
        if (known := self.peek(text, scope)) is not None:
            return known
        ids = array("I", self._encode(text))
        with self._lock:
            self._insert((scope, text), ids)
        return ids

    def peek(self, text: str, scope: str = "") -> Sequence[int] | None:
        """Token ids of `text` where they are remembered."""
        key = scope, text
        with self._lock:
            if (known := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
            return known

    def _insert(self, key: tuple[str, str], ids: array[int]) -> None:
        size = _size(key, ids)
        if key in self._entries or size > self._max_bytes // _MAX_SHARE:
            return
        self._entries[key] = ids
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= _size(*self._entries.popitem(last=False))


def _size(key: tuple[str, str], ids: array[int]) -> int:
    return sum(map(sys.getsizeof, key)) + len(ids) * ids.itemsize + _ENTRY_OVERHEAD
