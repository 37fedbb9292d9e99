"""How fast the engine can compute a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """The most tokens per second that steps have been seen to compute.

    A step with few tokens takes about as long as one with many, and says nothing of what long
    chunks would take: hence the best and not the mean. A GPU runs behind the host until somebody
    waits for what it sampled, so time is taken only from one such moment to the next.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.best = 0.0
        self._clock = clock
        self._tokens = 0
        self._since: float | None = None

    def begin(self) -> None:
        """A step begins."""
        if self._since is None:
            self._since = self._clock()

    def end(self, tokens: int, *, awaited: bool) -> float | None:
        """The step has computed `tokens`, and was `awaited` if anything was sampled from it.

        Then the seconds since the last such moment, or since the first step behind it began.
        """
        self._tokens += tokens
        if not awaited or self._since is None:
            return None
        seconds = self._clock() - self._since
        self.best = max(self.best, self._tokens / seconds)
        self._tokens, self._since = 0, None
        return seconds
