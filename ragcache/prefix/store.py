"""All blocks, and what can be found in them: pool, tree and retention, kept in agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragcache.prefix.blocks import Block, BlockPool, Node
from ragcache.prefix.names import block_keys, block_name
from ragcache.prefix.radix import RadixIndex
from ragcache.prefix.retention import Retention


class BlockStore:
    """Publishes blocks, finds them again, and forgets them where it must make room."""

    def __init__(
        self, num_blocks: int, block_size: int, retain_share: float, clock: Callable[[], float]
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = RadixIndex()
        self.retention = Retention(self.pool, retain_share, clock)
        self.evictions = 0

    def match(self, namespace: bytes, tokens: Sequence[int], limit: int) -> list[Block]:
        """Find the published whole blocks of the first `limit` tokens, as far as there are any."""
        stop = min(limit, len(tokens)) // self.block_size
        return self.index.match(namespace, block_keys(tokens, 0, stop, self.block_size))

    def take(self, count: int) -> list[int]:
        """Lend `count` available blocks, by id; those that were cached are forgotten."""
        taken = self.pool.take(count)
        for block in taken:
            if block.parent is not None:
                self.retention.evicted(block)
                self.index.remove(block)
                self.evictions += 1
        return [block.id for block in taken]

    def publish(
        self, namespace: bytes, tokens: Sequence[int], table: list[int], first: int, stop: int
    ) -> None:
        """Publish the logical blocks `first` to `stop` - 1 of a table; those before them are.

        Where an equal block is published already, the table goes over to it.
        """
        blocks = self.pool.blocks
        parent: Node = blocks[table[first - 1]] if first else self.index.root(namespace)
        for i, key in enumerate(block_keys(tokens, first, stop, self.block_size), first):
            ours = blocks[table[i]]
            if ours.copies:
                raise RuntimeError(f"block {ours.id} is committed while it is being copied")
            published = parent.children.get(key)
            if published is None:
                self.index.insert(parent, key, ours)
                published = ours
            elif published is not ours:  # computed twice: ours is free
                self.pool.hold([published])
                table[i] = published.id
                self.pool.release([ours])
            parent = published

    def names(self, namespace: bytes, path: Sequence[Block]) -> list[bytes]:
        """Name published blocks, in a row from the root of their namespace."""
        names: list[bytes] = []
        name = namespace
        for block in path:
            name = block.name = block.name or block_name(name, block.key)
            names.append(name)
        return names

    def drop(self, owner: bytes) -> int:
        """Forget the namespaces that begin with `owner`; returns how many blocks that were."""
        forgotten = self.index.drop(owner)
        self.retention.dropped(forgotten)
        self.pool.requeue(forgotten)  # now to the front
        return len(forgotten)
