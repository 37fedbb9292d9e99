"""Retention: prefixes that a breakpoint keeps cached for a time, softly.

A retained block that nobody holds is evicted after all others, but it is evicted: retention
blocks no admission, and at most a share of the pool is retained at all. Retention covers whole
prefixes, so a block's parents are always retained at least as long as the block itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import takewhile

from ragcache.prefix.blocks import Block, BlockPool
from ragcache.prefix.ends import Ends


@dataclass(slots=True, eq=False)
class Owner:
    """What one owner retains, in all of its namespaces."""

    count: int = 0
    ends: Ends = field(default_factory=Ends)


class Retention:
    """Which blocks are retained, for whom and until when.

    Owners share the cap fairly: each of the n that retain anything can have cap / n blocks,
    however long the others' retentions last, and more as far as the others leave room. `ends` are
    the retained blocks without a retained child; whatever ends, ends from there.
    """

    def __init__(self, pool: BlockPool, share: float, clock: Callable[[], float]) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"{share} is not a share of the pool")
        self.cap = int(share * len(pool.blocks))
        self.count = 0  # retained blocks, held ones included
        self.ends = Ends()
        self.owners: dict[bytes, Owner] = {}  # those that retain anything
        self._pool = pool
        self._clock = clock

    def retain(self, owner: bytes, path: Sequence[Block], ttl: float) -> int:
        """Retain an owner's published blocks, in a row from a root, for `ttl` seconds from now.

        Where that exceeds the cap, others give way as `_make_room` says, then the last blocks of
        the path go without. Returns how many blocks are retained. Costs O(log n) per block that
        gives way, and at the cap a look at each owner.
        """
        self.expire()
        until = self._clock() + ttl
        known = sum(1 for _ in takewhile(_is_retained, path))
        for block in path[:known]:
            block.keep_ttl = max(block.keep_ttl, ttl)
            block.keep_until = max(block.keep_until, until)
        room = self._make_room(owner, len(path) - known, until)
        kept = path[: known + room]
        self._add(owner, kept[known:], until, ttl)
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
        while self.ends and (first := self.ends.first()).keep_until <= now:
            self._shorten(first, now)

    def evicted(self, block: Block) -> None:
        """Forget a block, without retained children, that is about to leave the tree."""
        if block.keep_ttl:
            self._remove(block)

    def dropped(self, blocks: Iterable[Block]) -> None:
        """Forget all blocks of a tree that is gone."""
        for block in filter(_is_retained, blocks):
            self._clear(block)
            block.retained_children = 0

    def _make_room(self, name: bytes, count: int, until: float) -> int:
        """Let up to `count` more blocks of an owner fit under the cap; returns how many do.

        Up to its fair share, owners above theirs give way: while there is no room, there is one.
        Beyond it, only what the owner itself retains does, and only if it ends before `until`.
        """
        owner = self.owners.get(name) or Owner()
        fair = self.cap // (len(self.owners) + (name not in self.owners))
        room = min(count, self.cap - self.count)
        claim = min(count, fair - owner.count) - room
        if claim > 0:
            room += self._displace(self.owners.values(), fair, claim, math.inf)
        return room + self._displace([owner], 0, count - room, until)

    def _displace(self, owners: Iterable[Owner], keep: int, count: int, until: float) -> int:
        """Release up to `count` blocks that end before `until`, those first that end first.

        Every owner keeps `keep` blocks. Returns the number of released blocks.
        """
        above = [owner for owner in owners if owner.count > keep]
        queue = [(owner.ends.first().keep_until, i) for i, owner in enumerate(above)]
        heapify(queue)
        released = 0
        while released < count and queue and queue[0][0] < until:
            ends_at, i = queue[0]
            owner = above[i]
            limit = min(count - released, owner.count - keep)
            released += self._shorten(owner.ends.first(), ends_at, limit)
            if owner.count > keep:
                heapreplace(queue, (owner.ends.first().keep_until, i))
            else:
                heappop(queue)
        return released

    def _shorten(self, end: Block, until: float, limit: int | None = None) -> int:
        """Release blocks from an end upwards that are retained no longer than `until`."""
        released = 0
        while end in self.ends and end.keep_until <= until and released != limit:
            parent = end.parent
            self._remove(end)
            self._pool.requeue([end])
            released += 1
            if not isinstance(parent, Block):
                break
            end = parent
        return released

    def _add(self, name: bytes, path: Sequence[Block], until: float, ttl: float) -> None:
        """Retain blocks in a row; the parent of the first is a root or retained."""
        if not path:
            return
        owner = self.owners.setdefault(name, Owner())
        self.count += len(path)
        owner.count += len(path)
        for block in path:
            block.keep_owner, block.keep_until, block.keep_ttl = name, until, ttl
            if isinstance(block.parent, Block):
                block.parent.retained_children += 1
        for ends in (self.ends, owner.ends):
            if isinstance(path[0].parent, Block):
                ends.discard(path[0].parent)
            ends.add(path[-1])

    def _remove(self, end: Block) -> None:
        parent = end.parent
        self._clear(end)
        if isinstance(parent, Block):
            parent.retained_children -= 1
            if not parent.retained_children:
                self.ends.add(parent)
                self.owners[parent.keep_owner].ends.add(parent)

    def _clear(self, block: Block) -> None:
        owner = self.owners[block.keep_owner]
        for ends in (self.ends, owner.ends):
            ends.discard(block)
        self.count -= 1
        owner.count -= 1
        if not owner.count:
            del self.owners[block.keep_owner]
        block.keep_owner, block.keep_until, block.keep_ttl = b"", 0.0, 0.0


def _is_retained(block: Block) -> bool:
    return block.keep_ttl > 0
