"""The host tier: evicted blocks that live on in host memory.

A published block is in one place, the device or the host. Devices evict leaves first, so in a tree
the device's blocks are on top: a host block has host blocks below it, and a match is a run of
device blocks followed by a run of host blocks. Those are swapped in where that is cheaper than
computing them anew: the rule of FlexGen, arXiv 2303.06865, with costs measured on this machine.

Retention is the device's: what it keeps is evicted last, but once a block has moved to the host
its retention has ended, there and when it comes back, until a request with the same marker asks
for it anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from ragcache.prefix.blocks import Block, BlockPool
from ragcache.prefix.copies import Copies
from ragcache.prefix.radix import RadixIndex

Run = Sequence[Block]


class HostTier:
    """The host's blocks, and the swaps between them and the `device`'s.

    `min_swap` is the shortest run of blocks that is worth a swap. Without blocks there is no tier.
    """

    def __init__(
        self, num_blocks: int, min_swap: int, device: BlockPool, index: RadixIndex
    ) -> None:
        self.pool = BlockPool(num_blocks, on_host=True)
        self.swap_outs = Copies(device, self.pool)
        self.swap_ins = Copies(self.pool, device)
        self.min_swap = min_swap
        self.evictions = 0
        self._device = device
        self._index = index

    def split(self, run: Run) -> tuple[Run, Run]:
        """Part a match into what is on the device and what is to be swapped in, if worth it."""
        stop = bisect_left(run, True, key=attrgetter("on_host"))
        hosted = run[stop:]
        return run[:stop], hosted if len(hosted) >= self.min_swap else []

    def swap_out(self, block: Block) -> bool:
        """Put a host block in the place of one that is evicted; False where none can be had.

        The least recently used of the host's leaves gives way. It may be any, also one below
        `block`.
        """
        if not self.pool.available:
            return False
        (target,) = self.pool.take(1)
        if target.parent is not None:
            self._index.remove(target)
            self.evictions += 1
        self._index.replace(block, target)
        self._device.hold([block])
        self.swap_outs.add(block, target)
        return True

    def swap_in(self, source: Block, target: Block) -> None:
        """Put a device block in the place of a held host block, which is free once it was read."""
        self._index.replace(source, target)
        self._device.hold([target])
        self.swap_ins.add(source, target)
