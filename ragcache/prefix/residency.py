"""How long the device's blocks live, lie idle, and wait to be hit again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ragcache.prefix.blocks import Block
from ragcache.types import BlockTimes, Histogram

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)


class Residency:
    """Notes what `BlockTimes` tells; `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lifetime = Histogram(_SECONDS)
        self._idle_before_evict = Histogram(_SECONDS)
        self._reuse_gap = Histogram(_SECONDS)

    def hit(self, path: Sequence[Block]) -> None:
        """Note for how long a prefix lay idle that is about to be held again."""
        if path and not path[-1].ref_count:
            self._reuse_gap.observe(self._clock() - path[-1].used_at)

    def used(self, blocks: Iterable[Block]) -> None:
        """Note that a request is done with its blocks."""
        now = self._clock()
        for block in blocks:
            block.used_at = now

    def evicted(self, block: Block) -> None:
        """Note the end of a published block."""
        now = self._clock()
        self._lifetime.observe(now - block.published_at)
        self._idle_before_evict.observe(now - block.used_at)

    def times(self) -> BlockTimes:
        """What was noted so far."""
        return BlockTimes(
            self._lifetime.copy(), self._idle_before_evict.copy(), self._reuse_gap.copy()
        )
