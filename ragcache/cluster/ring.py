"""Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018)."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping

POINTS = 64  # of each replica on the ring: shares differ by about an eighth
BALANCE = 1.5  # times the mean load that a replica may have


class Ring:
    """Gives each key an order of replicas, the same in every process.

    When a replica comes or goes, only keys move that it has or had.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        self.ids = frozenset(ids)
        self._points = sorted(
            (_position(f"{i} {each}"), each) for each in self.ids for i in range(POINTS)
        )

    def order(self, key: str) -> list[str]:
        """All replicas, clockwise from the key's place."""
        start = bisect_left(self._points, (_position(key), ""))
        around = self._points[start:] + self._points[:start]
        return list(dict.fromkeys(each for _, each in around))

    def bounded(self, key: str, load: Mapping[str, float]) -> list[str]:
        """`order`, but that replicas at their bound come last.

        The bound is `BALANCE` times the mean of the requests in flight, the new one included.
        """
        in_flight = [load.get(each, 0) for each in self.ids]
        bound = math.ceil(BALANCE * (sum(in_flight) + 1) / max(len(in_flight), 1))
        return sorted(self.order(key), key=lambda each: load.get(each, 0) + 1 > bound)


def _position(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
