"""Copies of blocks that the next step is to make: copy-on-write, arXiv 2309.06180."""

from __future__ import annotations

from ragcache.prefix.blocks import Block, BlockPool


class Copies:
    """Copies from block to block; both ends of each stay held until it has run."""

    def __init__(self, pool: BlockPool) -> None:
        self.waiting: list[tuple[Block, Block]] = []  # source, target; for the next step
        self.running: list[tuple[Block, Block]] = []  # handed to a step
        self._pool = pool

    def add(self, source: Block, target: Block) -> None:
        """Schedule a copy; it takes over the caller's reference to `source`."""
        self._pool.hold([target])
        source.copies += 1
        target.copies += 1
        self.waiting.append((source, target))

    def take(self) -> list[tuple[int, int]]:
        """Hand all that wait to the step that is about to run: (source id, target id)."""
        taken, self.waiting = self.waiting, []
        self.running += taken
        return [(source.id, target.id) for source, target in taken]

    def done(self) -> None:
        """Let go of the copies taken so far: they have run."""
        done, self.running = self.running, []
        for pair in done:
            for block in pair:
                block.copies -= 1
            self._pool.release(pair)
