"""What a host tier of blocks must hold, for tests: a naive model beside the real one."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from ragcache.prefix.copies import Copies
from ragcache.prefix.host import HostTier

Prefix = tuple[bytes, tuple[int, ...]]  # namespace, tokens
Slots = dict[tuple[int, int], object]  # (block, offset) -> what is written there


@dataclass
class Swaps:
    """Pairs of source and target: those for the next step, and those of the one that runs."""

    waiting: list[tuple[int, int]] = field(default_factory=list)
    running: list[tuple[int, int]] = field(default_factory=list)

    def ends(self, index: int) -> set[int]:
        return {pair[index] for pair in self.waiting + self.running}

    def new(self, copies: Copies) -> list[tuple[int, int]]:
        """What the cache has scheduled and the model has not yet seen."""
        pairs = [(source.id, target.id) for source, target in copies.waiting]
        assert pairs[: len(self.waiting)] == self.waiting
        return pairs[len(self.waiting) :]


def run(pairs: list[tuple[int, int]], source: Slots, target: Slots, size: int) -> None:
    """Copy blocks of `size` slots, all at once."""
    read = [[source.get((block, offset)) for offset in range(size)] for block, _ in pairs]
    for (_, block), entries in zip(pairs, read, strict=True):
        target.update({(block, offset): entry for offset, entry in enumerate(entries)})


class NaiveHost:
    """The prefixes on the host, and the swaps; which host block is taken, `tier` decides."""

    def __init__(self, tier: HostTier, num_blocks: int, min_swap: int) -> None:
        self.num_blocks, self.min_swap = num_blocks, min_swap
        self.published: dict[Prefix, int] = {}  # -> host block
        self.slots: Slots = {}
        self.swap_outs, self.swap_ins = Swaps(), Swaps()
        self.wanted: set[int] = set()  # host blocks that are about to be swapped in
        self._tier = tier

    def held(self) -> set[int]:
        return self.swap_outs.ends(1) | self.swap_ins.ends(0) | self.wanted

    def hits(self, prefixes: list[Prefix]) -> list[Prefix]:
        """Of prefixes that go on where the device's end, those that are swapped in."""
        run = list(takewhile(self.published.__contains__, prefixes))
        return run if len(run) >= self.min_swap else []

    def kv(self, block: int, offset: int, device: Slots) -> object:
        """What a slot will hold once the swaps that are waiting have run."""
        swapped = {target: source for source, target in self.swap_outs.waiting}
        if block in swapped:
            return device.get((swapped[block], offset))
        return self.slots.get((block, offset))

    def evict(self, prefix: Prefix, block: int) -> None:
        """A prefix lost its block on the device: it is here now, if there is room."""
        free = set(range(self.num_blocks)) - self.held()
        if not free:
            self.published = {p: b for p, b in self.published.items() if not is_below(p, prefix)}
            return
        source, target = self.swap_outs.new(self._tier.swap_outs)[0]
        assert source == block
        assert target in free, "a host block in use was given away"
        for lost in [each for each, hosted in self.published.items() if hosted == target]:
            assert not free - set(self.published.values()), "there was a free host block"
            del self.published[lost]
            assert not any(is_below(each, lost) for each in self.published), "not a leaf"
        self.swap_outs.waiting.append((source, target))
        self.published[prefix] = target

    def swap_in(self, prefixes: list[Prefix], table: list[int]) -> None:
        """These prefixes leave for these blocks of the device."""
        swaps = [(self.published.pop(p), block) for p, block in zip(prefixes, table, strict=True)]
        assert self.swap_ins.new(self._tier.swap_ins) == swaps
        self.swap_ins.waiting += swaps

    def run(self, device: Slots, size: int) -> None:
        """The swaps of a step run, those out first."""
        run(self.swap_outs.waiting, device, self.slots, size)
        run(self.swap_ins.waiting, self.slots, device, size)
        for swaps in (self.swap_outs, self.swap_ins):
            swaps.running += swaps.waiting
            swaps.waiting = []

    def ran(self) -> None:
        """The step is over."""
        self.swap_outs.running, self.swap_ins.running = [], []


def is_below(one: Prefix, other: Prefix) -> bool:
    return one[0] == other[0] and one != other and one[1][: len(other[1])] == other[1]
