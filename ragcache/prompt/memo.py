"""Encodings that are worth remembering."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

_ENTRY_OVERHEAD = 200  # bytes of one entry besides its text and ids: array header, links, slot


class EncodingMemo:
    """The most recently used results of `encode`, up to a number of bytes.

    Safe to use from several threads; two that miss the same text at once both encode it.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], max_bytes: int = 32 << 20) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()

    def __call__(self, text: str) -> Sequence[int]:
        """Token ids of `text`."""
        with self._lock:
            if (known := self._entries.get(text)) is not None:
                self._entries.move_to_end(text)
                return known
        ids = array("I", self._encode(text))
        with self._lock:
            self._insert(text, ids)
        return ids

    def _insert(self, text: str, ids: array[int]) -> None:
        if text in self._entries:
            return
        self._entries[text] = ids
        self._bytes += _size(text, ids)
        while self._bytes > self._max_bytes:
            self._bytes -= _size(*self._entries.popitem(last=False))


def _size(text: str, ids: array[int]) -> int:
    return sys.getsizeof(text) + len(ids) * ids.itemsize + _ENTRY_OVERHEAD
