"""Physical blocks, and the pool that lends them.

A block is its own node in the prefix tree and its own link in the queue, so there is no second
structure that could disagree about where it is. In each of the two pools, that of the device and
that of the host:

    parent       set      None
    ref_count
      > 0        held     held       lent to running requests
      = 0        cached   free       in the queue

Free and cached blocks wait in one queue: free ones in front, then the cached ones, least recently
used first, and behind a mark those cached ones that a retention keeps, ordered in the same way. A
hit unlinks a cached block; taking from the front evicts it. Both are O(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ragcache.types import PoolCounts


class Node:
    """A place in the prefix tree: the root of a namespace or, as a `Block`, a published block."""

    __slots__ = ("children", "key", "name", "parent")

    def __init__(self, key: bytes = b"") -> None:
        self.parent: Node | None = None
        self.key = key  # a root's namespace; a block's tokens
        self.name = key  # a root's namespace; a published block's `block_name`, once it is wanted
        self.children: dict[bytes, Block] = {}


class Block(Node):
    """One physical block; published, that is findable by later prompts, while `parent` is set.

    Its `id` counts within its pool: the host's, or the device's.
    """

    __slots__ = (
        "copies",
        "hits",
        "id",
        "keep_owner",
        "keep_ttl",
        "keep_until",
        "next",
        "on_host",
        "prev",
        "published_at",
        "ref_count",
        "retained_children",
        "used_at",
    )

    def __init__(self, block_id: int, on_host: bool = False) -> None:
        super().__init__()
        self.id = block_id
        self.on_host = on_host
        self.ref_count = 0  # block tables it is in, plus `copies`
        self.copies = 0  # copies under way from or to it
        self.published_at = 0.0
        self.hits = 0  # prompts that have read it since then
        self.used_at = 0.0  # when a request last let go of it
        self.keep_owner = b""  # for whom it is retained
        self.keep_until = 0.0  # when its retention ends
        self.keep_ttl = 0.0  # seconds it lasts from each read on; 0: not retained
        self.retained_children = 0
        self.prev = self.next = self  # meaningful only in the queue

    def __str__(self) -> str:
        return f"host block {self.id}" if self.on_host else f"block {self.id}"


class BlockPool:
    """All physical blocks of a tier and the queue of those that nobody holds.

    A parent enters the queue after all its children in this pool: whoever holds a block holds its
    parents too and releases them after it, and the parent of a retained block is retained. Hence
    the front of the queue is always a leaf, as far as this pool goes.
    """

    def __init__(self, num_blocks: int, on_host: bool = False) -> None:
        self.blocks = [Block(block_id, on_host) for block_id in range(num_blocks)]
        self.free = num_blocks
        self.cached = 0
        self._mark = Block(-1)  # retained blocks lie behind it
        self._end = Block(-1)  # closes the queue to a ring, so no link is ever missing
        for before, after in pairwise([self._end, *self.blocks, self._mark, self._end]):
            before.next, after.prev = after, before

    @property
    def available(self) -> int:
        """Blocks that can be taken: free + cached."""
        return self.free + self.cached

    def counts(self) -> PoolCounts:
        """Count the blocks by state."""
        return PoolCounts(self.free, self.cached, held=len(self.blocks) - self.available)

    def queue(self) -> Iterator[Block]:
        """Walk the queue from the front, the next block to be taken, to the back."""
        block = self._end.next
        while block is not self._end:
            if block is not self._mark:
                yield block
            block = block.next

    def take(self, count: int) -> list[Block]:
        """Lend `count` blocks (at most `available`) from the front of the queue.

        Blocks that were cached come with `parent` still set: the caller forgets them.
        """
        taken = []
        before, front = self._end, self._end.next
        for _ in range(count):
            if front is self._mark:  # only retained blocks are left
                before.next, front.prev = front, before
                before, front = front, front.next
            taken.append(front)
            front.ref_count = 1
            if front.parent is None:
                self.free -= 1
            else:
                self.cached -= 1
            front = front.next
        before.next, front.prev = front, before
        return taken

    def hold(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block, out of the queue if it was cached."""
        for block in blocks:
            if not block.ref_count:
                before, after = block.prev, block.next
                before.next, after.prev = after, before
                self.cached -= 1
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Remove one reference from each block, in this order; children come before parents.

        At zero references a block goes to the back of the cached or of the retained ones, or, not
        being published, to the front of all.
        """
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.parent is None:
                before, after = self._end, self._end.next
                self.free += 1
            else:
                after = self._end if block.keep_ttl else self._mark
                before = after.prev
                self.cached += 1
            block.prev, block.next = before, after
            before.next = after.prev = block

    def requeue(self, blocks: Iterable[Block]) -> None:
        """Move those that are in the queue to where they belong by now, children first."""
        idle = [block for block in blocks if not block.ref_count]
        self.hold(idle)
        self.release(idle)
