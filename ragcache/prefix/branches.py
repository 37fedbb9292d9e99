"""The hottest branches of the prefix tree: what prompts have in common most often.

A branch is a row of blocks that much the same prompts read. It ends where the tree forks into
blocks that were both hit, and where half of the prompts that came into it have left it: so a long
conversation, of which every turn reads a bit more, is a few branches and not one a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, nlargest
from itertools import count as counter
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from ragcache.prefix.blocks import Block, Node
from ragcache.prefix.names import block_name
from ragcache.prefix.radix import RadixIndex
from ragcache.types import HotPrefix

MOST_SEEN = 10_000  # nodes; some milliseconds, and most of that for blocks without a name


class _Start(NamedTuple):
    """The first block of a branch, and what is in front of it."""

    block: Block
    above: bytes  # the name of the block in front, or of the namespace
    parent: bytes | None  # the name of the branch in front, if there is one
    depth: int  # blocks in front


def hottest(
    index: RadixIndex, owner: bytes, block_size: int, count: int, most: int = MOST_SEEN
) -> list[HotPrefix]:
    """Find the `count` branches of an owner with the most hits, parents before their children.

    The hottest branch is followed first, so little of a large tree is seen: at most `most` nodes,
    of those with many children the oldest ones. The blocks on the way get their names.
    """
    walk = _Walk(count, most)
    for namespace, root in islice(index.roots.items(), most):
        if namespace.startswith(owner):
            walk.fork(walk.hit_children(root), namespace, None, 0)
    return [walk.follow(start, block_size) for start in walk]


class _Walk:
    """An iterator of `count` branches that begin at the forks found so far, the hottest first."""

    def __init__(self, count: int, most: int) -> None:
        self._count = count
        self._left = most
        self._starts: list[tuple[int, int, _Start]] = []  # a heap
        self._order = counter()

    def __iter__(self) -> Iterator[_Start]:
        for _ in range(self._count):
            if not self._starts:
                return
            yield heappop(self._starts)[-1]

    def hit_children(self, node: Node) -> list[Block]:
        """The children that any prompt has read, of those that may still be seen."""
        children, room = node.children, max(self._left, 0)
        self._left -= len(children)
        return [child for child in islice(children.values(), room) if child.hits]

    def fork(self, blocks: list[Block], above: bytes, parent: bytes | None, depth: int) -> None:
        """Note where branches begin, as far as their turn can come."""
        for block in nlargest(self._count, blocks, key=attrgetter("hits")):
            start = _Start(block, above, parent, depth)
            heappush(self._starts, (-block.hits, next(self._order), start))

    def follow(self, start: _Start, block_size: int) -> HotPrefix:
        """Go down a branch to its end."""
        block, name, depth, hits = start.block, start.above, start.depth, 0
        while True:
            name = block.name = block.name or block_name(name, block.key)
            depth, hits = depth + 1, hits + block.hits
            below = self.hit_children(block)
            if len(below) != 1 or 2 * below[0].hits <= start.block.hits:
                break
            block = below[0]
        self.fork(below, name, name, depth)
        return HotPrefix(
            name,
            start.parent,
            depth * block_size,
            block.hits,
            hits * block_size,
            block.published_at,
            block.keep_until if block.keep_ttl else None,
        )
