"""What the prompts of one tenant came to: in all, by segment, and over the recent past."""

from __future__ import annotations

import time
from array import array
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ragcache.metrics.hit_rate import HitRate, Hits
from ragcache.metrics.slots import Clock, Slots
from ragcache.types import Explanation, Segment

# What a segment counts to; `prompt` is one that was given as a whole, as text or token ids.
SEGMENTS = {
    "tools": "tools",
    "system": "system",
    "messages": "messages",
    "generation_prompt": "messages",
    "prompt": "prompt",
}
SLOT, SLOTS = 2, 300  # seconds, and how many: ten minutes of history
_WAITS_SLOT, _WAITS_SLOTS = 10, 60  # longer, or a slot had too few waits for percentiles
_MISSES = 50


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest number that so many percent of them do not exceed; None of none."""
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else None


class Miss(NamedTuple):
    """A prompt that missed something, and why."""

    at: float  # on the tally's clock
    request_id: str
    explanation: Explanation


class Tally:
    """What one tenant's prompts came to; `segments` add up to `whole`."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.whole = HitRate(clock)
        self.segments = {name: HitRate(clock) for name in dict.fromkeys(SEGMENTS.values())}
        self.history = Slots(SLOT, SLOTS, Hits, clock)
        self.waits = Slots(_WAITS_SLOT, _WAITS_SLOTS, _no_waits, clock)
        self.misses: deque[Miss] = deque(maxlen=_MISSES)

    def prompt(self, segments: Sequence[Segment], hit_tokens: int) -> Mapping[str, Hits]:
        """Count an admitted prompt, whose first `hit_tokens` were hits; returns it by segment."""
        tokens: defaultdict[str, Hits] = defaultdict(Hits)
        for name, start, end in segments:
            found = min(max(hit_tokens - start, 0), end - start)
            tokens[SEGMENTS[name.partition(".")[0]]].add(end - start, found)
        for name, part in tokens.items():
            for counter in (self.segments[name], self.whole, self.history.now()):
                counter.add(part.query, part.hit)
        return tokens

    def first_token(self, seconds: float) -> None:
        """Count how long a request has waited for its first token."""
        insort(self.waits.now(), seconds)

    def explained(self, request_id: str, explanation: Explanation) -> None:
        """Remember a prompt that missed something."""
        if explanation.reason is not None:
            self.misses.append(Miss(self.clock(), request_id, explanation))


def _no_waits() -> array[float]:
    return array("d")  # seconds, in order of size
