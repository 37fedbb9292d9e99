"""Ways to give requests KV memory: contiguous reservations, and the engine's own block pool.

The first are what arXiv 2309.06180 compares with (§2 and §6): room for the longest request there
can be, for the next power of two of the answer's length, or, by an oracle, for its exact length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.names import namespace_name, owner_name

NAMESPACE = namespace_name(owner_name("report"))


@dataclass(slots=True, eq=False)
class Job:
    """A request: the tokens of its prompt and its answer so far, and how many it will have."""

    name: int
    tokens: list[int]
    total: int
    longest: int
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def to_come(self) -> int:
        """Tokens that the answer still lacks."""
        return self.total - len(self.tokens)


@dataclass(frozen=True, slots=True)
class Slots:
    """Token slots of the memory by what is in them."""

    total: int
    tokens: int  # KV of a token, each once however many share it
    to_come: int  # reserved, and used before the request ends
    unused: int  # reserved, and never used

    @property
    def free(self) -> int:
        """Reserved by nobody."""
        return self.total - self.tokens - self.to_come - self.unused


class Memory(Protocol):
    """KV memory for running requests."""

    def start(self, job: Job) -> bool:
        """Make room for its tokens so far; False, and no change, where there is none."""

    def grow(self, job: Job) -> bool:
        """Make room for the token that its list has got; False, and no change, without room."""

    def end(self, job: Job) -> None:
        """Take back all that it has."""

    def slots(self, running: list[Job]) -> Slots:
        """What is in the memory, with these requests running."""


class Contiguous:
    """Every request gets one piece of `size(job)` slots at the start, where it first fits."""

    def __init__(self, total: int, size: Callable[[Job], int]) -> None:
        self._total = total
        self._size = size
        self._pieces: list[tuple[int, int, Job]] = []  # from, to, whose; in order

    def start(self, job: Job) -> bool:
        """See `Memory`."""
        size, begin = self._size(job), 0
        for i, (first, stop, _) in enumerate(self._pieces):
            if first - begin >= size:
                self._pieces.insert(i, (begin, begin + size, job))
                return True
            begin = stop
        if self._total - begin < size:
            return False
        self._pieces.append((begin, begin + size, job))
        return True

    def grow(self, job: Job) -> bool:
        """See `Memory`; the piece has the room already."""
        return True

    def end(self, job: Job) -> None:
        """See `Memory`."""
        self._pieces = [piece for piece in self._pieces if piece[2] is not job]

    def slots(self, running: list[Job]) -> Slots:
        """See `Memory`."""
        tokens = sum(len(job.tokens) for job in running)
        to_come = sum(job.to_come for job in running)
        reserved = sum(stop - first for first, stop, _ in self._pieces)
        return Slots(self._total, tokens, to_come, reserved - tokens - to_come)


class Paged:
    """The prefix cache; requests start where its engine would start them.

    With `share` off every request has its own copy of what others have too.
    """

    def __init__(self, total: int, block_size: int, *, share: bool = True) -> None:
        self.cache = PrefixCache(total // block_size, block_size, share=share)
        self._running = 0

    def start(self, job: Job) -> bool:
        """See `Memory`; a block for each running request stays in reserve, as in the scheduler."""
        plan = self.cache.plan(job.tokens, NAMESPACE)
        if plan.blocks_needed + self._running > self.cache.available:
            return False
        if self.cache.admit(job.name, plan) is None:
            return False
        self.cache.commit(job.name, len(job.tokens))
        self._running += 1
        return True

    def grow(self, job: Job) -> bool:
        """See `Memory`."""
        if not self.cache.grow(job.name, len(job.tokens)):
            return False
        self.cache.commit(job.name, len(job.tokens))
        return True

    def end(self, job: Job) -> None:
        """See `Memory`."""
        self.cache.release(job.name)
        self._running -= 1

    def slots(self, running: list[Job]) -> Slots:
        """See `Memory`; only a last block has empty slots, and no others share it."""
        counts, size = self.cache.counts(), self.cache.block_size
        empty = [-len(job.tokens) % size for job in running]
        to_come = sum(min(n, job.to_come) for n, job in zip(empty, running, strict=True))
        held = counts.held * size
        return Slots(counts.total * size, held - sum(empty), to_come, sum(empty) - to_come)

    def table_entries(self, running: list[Job]) -> int:
        """Entries of all block tables."""
        return sum(len(self.cache.table(job.name)) for job in running)


def reservations(total: int) -> dict[str, Memory]:
    """The three contiguous ways, from the most wasteful to the one that knows the future."""
    return {
        "room for the longest": Contiguous(total, lambda job: job.longest),
        "next power of two": Contiguous(
            total, lambda job: job.prompt + (1 << (job.total - job.prompt - 1).bit_length())
        ),
        "exact, by an oracle": Contiguous(total, lambda job: job.total),
    }
