"""Retention: prefixes that a breakpoint keeps cached for a time, softly.

A retained block that nobody holds is evicted after all others, but it is evicted: retention
blocks no admission, and at most a share of the pool is retained at all. Retention covers whole
prefixes, so a block's parents are always retained at least as long as the block itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from ragcache.prefix.blocks import Block, BlockPool


class Retention:
    """Which blocks are retained and until when.

    `ends` are the retained blocks without a retained child; whatever ends, ends from there. An
    expiry walks over all ends, every other operation only over the blocks that it concerns.
    """

    def __init__(self, pool: BlockPool, share: float, clock: Callable[[], float]) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"{share} is not a share of the pool")
        self.cap = int(share * len(pool.blocks))
        self.count = 0  # retained blocks, held ones included
        self.ends: dict[Block, None] = {}  # a set that keeps its order
        self.next_expiry = math.inf  # no retention ends before; a refresh leaves it too early
        self._pool = pool
        self._clock = clock

    def retain(self, path: Sequence[Block], ttl: float) -> int:
        """Retain published blocks, in a row from a root, for `ttl` seconds from now.

        Where that exceeds the cap, retentions that end earlier than this one give way, then the
        last blocks of the path go without. Returns how many blocks are retained.
        """
        self.expire()
        until = self._clock() + ttl
        known = sum(1 for _ in takewhile(_is_retained, path))
        for block in path[:known]:
            block.keep_ttl = max(block.keep_ttl, ttl)
            block.keep_until = max(block.keep_until, until)
        self._make_room(len(path) - known, until)
        kept = path[: known + self.cap - self.count]
        for block in kept[known:]:
            self._add(block, until, ttl)
        self._pool.requeue(reversed(kept))
        return len(kept)

    def refresh(self, hits: Iterable[Block]) -> None:
        """Let the retention of the leading hits start anew: they are being read."""
        now = self._clock()
        for block in takewhile(_is_retained, hits):
            block.keep_until = max(block.keep_until, now + block.keep_ttl)

    def expire(self) -> None:
        """End what has run out; the blocks become the most recently used of the others."""
        now = self._clock()
        if now < self.next_expiry:
            return
        for end in list(self.ends):
            self._shorten(end, now)
        self.next_expiry = min((end.keep_until for end in self.ends), default=math.inf)

    def evicted(self, block: Block) -> None:
        """Forget a block, without retained children, that is about to leave the tree."""
        if block.keep_ttl:
            self._remove(block)

    def dropped(self, blocks: Iterable[Block]) -> None:
        """Forget all blocks of a tree that is gone."""
        for block in filter(_is_retained, blocks):
            self._clear(block)
            block.retained_children = 0

    def _make_room(self, count: int, until: float) -> None:
        """Let `count` more blocks fit under the cap, as far as others end before `until`."""
        while self.ends and (excess := self.count + count - self.cap) > 0:
            first = min(self.ends, key=lambda end: end.keep_until)
            if first.keep_until >= until:
                return
            self._shorten(first, first.keep_until, excess)

    def _shorten(self, end: Block, until: float, limit: int | None = None) -> None:
        """Release blocks from an end upwards that are retained no longer than `until`."""
        released = 0
        while end in self.ends and end.keep_until <= until and released != limit:
            parent = end.parent
            self._remove(end)
            self._pool.requeue([end])
            released += 1
            if not isinstance(parent, Block):
                return
            end = parent

    def _add(self, block: Block, until: float, ttl: float) -> None:
        block.keep_until, block.keep_ttl = until, ttl
        self.count += 1
        self.ends[block] = None
        self.next_expiry = min(self.next_expiry, until)
        if isinstance(block.parent, Block):
            block.parent.retained_children += 1
            self.ends.pop(block.parent, None)

    def _remove(self, end: Block) -> None:
        parent = end.parent
        self._clear(end)
        if isinstance(parent, Block):
            parent.retained_children -= 1
            if not parent.retained_children:
                self.ends[parent] = None

    def _clear(self, block: Block) -> None:
        block.keep_until = block.keep_ttl = 0.0
        self.count -= 1
        self.ends.pop(block, None)


def _is_retained(block: Block) -> bool:
    return block.keep_ttl > 0
