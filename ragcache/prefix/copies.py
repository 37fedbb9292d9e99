"""Copies of blocks that the next step is to make.

Within the device: copy-on-write, arXiv 2309.06180. Between the device and the host: swaps.
"""

from __future__ import annotations

from ragcache.prefix.blocks import Block, BlockPool


class Copies:
    """Copies from one pool to one pool; both ends of each stay held until it has run."""

    def __init__(self, sources: BlockPool, targets: BlockPool) -> None:
        self.total = 0  # asked for, ever
        self.waiting: list[tuple[Block, Block]] = []  # source, target; for the next step
        self.running: list[tuple[Block, Block]] = []  # handed to a step
        self._sources = sources
        self._targets = targets

    def add(self, source: Block, target: Block) -> None:
        """Schedule a copy; it takes over a reference to each end from the caller."""
        self.total += 1
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
        for source, target in done:
            source.copies -= 1
            target.copies -= 1
            self._sources.release([source])
            self._targets.release([target])
