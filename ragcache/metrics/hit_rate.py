"""The hit rate, in all and over sliding windows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ragcache.metrics.slots import Clock, Slots


@dataclass(slots=True)
class Hits:
    """Prompt tokens that were looked up in the cache, and those of them that were found."""

    query: int = 0
    hit: int = 0

    def add(self, query: int, hit: int) -> None:
        """Count more of both."""
        self.query += query
        self.hit += hit

    @property
    def rate(self) -> float | None:
        """The share that was found; None where nothing was looked up."""
        return self.hit / self.query if self.query else None


class HitRate:
    """Hits since the start, and over windows of up to five minutes, second by second."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.total = Hits()
        self._seconds = Slots(1, 300, Hits, clock)

    def add(self, query: int, hit: int) -> None:
        """Count one admitted prompt, or a part of it."""
        self.total.add(query, hit)
        self._seconds.now().add(query, hit)

    def over(self, seconds: int) -> float | None:
        """The rate over the last `seconds` (≤ 300); None without a prompt."""
        window = Hits()
        for each in self._seconds.last(seconds):
            window.add(each.query, each.hit)
        return window.rate
