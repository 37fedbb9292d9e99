"""The hit rate, in all and over sliding windows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class HitRate:
    """The share of prompt tokens that came from the cache, in all and over sliding windows.

    One bucket per second in which something was admitted, none older than the longest window.
    """

    longest = 300

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.query_tokens = 0
        self.hit_tokens = 0
        self._clock = clock
        self._buckets: deque[tuple[int, int, int]] = deque()  # second, query tokens, hit tokens

    def add(self, query_tokens: int, hit_tokens: int) -> None:
        """Count one admitted prompt."""
        self.query_tokens += query_tokens
        self.hit_tokens += hit_tokens
        now = int(self._clock())
        if self._buckets and self._buckets[-1][0] == now:
            _, queried, hit = self._buckets.pop()
            query_tokens, hit_tokens = query_tokens + queried, hit_tokens + hit
        self._buckets.append((now, query_tokens, hit_tokens))
        while self._buckets[0][0] <= now - self.longest:
            self._buckets.popleft()

    @property
    def total(self) -> float | None:
        """Hit tokens / query tokens since the start; None without a prompt."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None

    def over(self, seconds: int) -> float | None:
        """Hit tokens / query tokens of the last `seconds` (≤ 300); None without a prompt."""
        oldest = int(self._clock()) - seconds
        recent = [bucket for bucket in self._buckets if bucket[0] > oldest]
        queried = sum(bucket[1] for bucket in recent)
        return sum(bucket[2] for bucket in recent) / queried if queried else None
