"""All blocks, and what can be found in them: pools, tree and retention, kept in agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragcache.prefix.blocks import Block, BlockPool, Node
from ragcache.prefix.events import BlockSink
from ragcache.prefix.host import HostTier
from ragcache.prefix.names import block_keys
from ragcache.prefix.radix import RadixIndex, walk
from ragcache.prefix.residency import Residency
from ragcache.prefix.retention import Retention


class BlockStore:
    """Publishes blocks, finds them again, and evicts them where it must make room.

    What is evicted moves to the host tier, or is forgotten where that is full of what is in use.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        retain_share: float,
        clock: Callable[[], float],
        host_blocks: int,
        min_swap: int,
        sink: BlockSink | None,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.index = RadixIndex(sink)
        self.host = HostTier(host_blocks, min_swap, self.pool, self.index)
        self.retention = Retention(self.pool, retain_share, clock)
        self.residency = Residency(clock)
        self.evictions = 0
        self._clock = clock

    def match(self, namespace: bytes, tokens: Sequence[int], limit: int) -> list[Block]:
        """Find the published whole blocks of the first `limit` tokens, as far as there are any.

        Device blocks come first, see `HostTier.split`.
        """
        stop = min(limit, len(tokens)) // self.block_size
        return self.index.match(namespace, block_keys(tokens, 0, stop, self.block_size))

    def take(self, count: int) -> list[int]:
        """Lend `count` available blocks, by id; those that were cached are evicted."""
        taken = self.pool.take(count)
        for block in taken:
            if block.parent is not None:
                self._evict(block)
        return [block.id for block in taken]

    def swap_in(self, hosted: Sequence[Block]) -> list[int]:
        """Lend available device blocks, by id, that take the places of a run of host blocks."""
        self.host.pool.hold(hosted)  # or making room for them might evict them
        table = self.take(len(hosted))
        for source, block_id in zip(hosted, table, strict=True):
            self.host.swap_in(source, self.pool.blocks[block_id])
        return table

    def publish(
        self, namespace: bytes, tokens: Sequence[int], table: list[int], first: int, stop: int
    ) -> None:
        """Publish the logical blocks `first` to `stop` - 1 of a table; those before them are.

        Where an equal device block is published already, the table goes over to it; a host block
        gives way to ours.
        """
        blocks, now = self.pool.blocks, self._clock()
        parent: Node = blocks[table[first - 1]] if first else self.index.root(namespace)
        for i, key in enumerate(block_keys(tokens, first, stop, self.block_size), first):
            ours = blocks[table[i]]
            if ours.copies:
                raise RuntimeError(f"block {ours.id} is committed while it is being copied")
            published = parent.children.get(key)
            if published is None:
                self.index.insert(parent, key, ours, now)
                published = ours
            elif published.on_host:
                self.index.replace(published, ours)
                self.host.pool.requeue([published])
                published = ours
            elif published is not ours:  # computed twice: ours is free
                self.pool.hold([published])
                table[i] = published.id
                self.pool.release([ours])
            parent = published

    def drop(self, owner: bytes) -> int:
        """Forget the namespaces that begin with `owner`; returns how many blocks that were."""
        forgotten = self.index.drop(owner)
        self.retention.dropped(forgotten)
        self.pool.requeue(block for block in forgotten if not block.on_host)  # now to the front
        self.host.pool.requeue(block for block in forgotten if block.on_host)
        return len(forgotten)

    def _evict(self, block: Block) -> None:
        self.retention.evicted(block)
        self.residency.evicted(block)
        self.evictions += 1
        if not self.host.swap_out(block):
            below = list(walk(block))  # on the host, and held there: their KV is still to come
            for each in (*reversed(below), block):
                self.index.remove(each)
            self.host.evictions += len(below)
