"""Retained blocks in the order in which their retention ends."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from ragcache.prefix.blocks import Block


class Ends:
    """A set of blocks that knows which of them ends first: a heap with lazy deletion.

    A block's `keep_until` may move while it is in the set, but only to later. Each operation costs
    O(log n), amortized, and the heap is at most about twice as long as the set.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Block]] = []  # with a time not after `keep_until`
        self._serials: dict[Block, int] = {}  # of the one entry of a block that counts
        self._counter = count()

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, block: Block) -> bool:
        return block in self._serials

    def add(self, block: Block) -> None:
        """Add a block that is not in the set."""
        serial = self._serials[block] = next(self._counter)
        heappush(self._heap, (block.keep_until, serial, block))

    def discard(self, block: Block) -> None:
        """Remove a block, if it is in the set."""
        self._serials.pop(block, None)
        if len(self._heap) > 2 * len(self._serials) + 8:
            self._heap = [(block.keep_until, i, block) for block, i in self._serials.items()]
            heapify(self._heap)

    def first(self) -> Block:
        """Return the block that ends first, of equal ones the one added first; IndexError if empty.

        What has been discarded or has moved since is put right only once it comes to the front.
        """
        while True:
            until, serial, block = self._heap[0]
            if self._serials.get(block) != serial:
                heappop(self._heap)
            elif block.keep_until > until:
                heapreplace(self._heap, (block.keep_until, serial, block))
            else:
                return block
