"""Replicas in simulated time: a real prefix cache, and a model that takes the time it is given.

A block of a trace is one token here, so that a cache with a block size of one token has as many
blocks as the trace counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from ragcache.bench.traces import BLOCK, TraceRequest
from ragcache.cluster.blocks import NAME_BYTES, Changes
from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.names import namespace_name, owner_name

PREFILL_RATE = 7000.0  # tokens a second
TOKEN_TIME = 0.03  # seconds that a token of an answer takes
MAX_RUNNING = 64  # requests at once
FINGERPRINT = "simulated"
NAMESPACE = namespace_name(owner_name(FINGERPRINT, ""))


class Agenda:
    """What happens when; a clock for everybody."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count().__next__
        self._entries: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Do something later; of two things at one time, the one that was entered first."""
        heappush(self._entries, (when, self._order(), do))

    def run(self) -> None:
        """Do everything, in order."""
        while self._entries:
            self.now, _, do = heappop(self._entries)
            do()

    def clock(self) -> float:
        """The simulated time."""
        return self.now


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way; `done` is called when the answer is complete."""

    id: int
    trace: TraceRequest
    arrived: float
    done: Callable[[int], None]
    hit_tokens: int = 0


class Node:
    """A replica with a real prefix cache; prompts are prefilled one after the other.

    It implements `BlockSink`: what changes is published when a prompt begins or ends.
    """

    def __init__(
        self,
        agenda: Agenda,
        blocks: int,
        publish: Callable[[Changes], None],
        strength: int = 1,
    ) -> None:
        self.cache = PrefixCache(blocks, 1, clock=agenda.clock, sink=self)
        self.waiting: deque[Job] = deque()
        self.running = 0
        self.ttft: list[float] = []  # seconds
        self.computed_tokens = 0
        self._agenda = agenda
        self._strength = strength  # of so many replicas
        self._publish = publish
        self._places: dict[bytes, bool | None] = {}
        self._prefilling = False

    def stored(self, name: bytes, on_host: bool) -> None:
        """See `BlockSink`."""
        self._places[name[:NAME_BYTES]] = on_host

    def removed(self, name: bytes) -> None:
        """See `BlockSink`."""
        self._places[name[:NAME_BYTES]] = None

    def submit(self, job: Job) -> None:
        """Put a request into the queue."""
        self.waiting.append(job)
        self._start()

    def _start(self) -> None:
        if self._prefilling or not self.waiting or self.running >= MAX_RUNNING * self._strength:
            return
        job = self.waiting[0]
        row = self.cache.admit(job.id, self.cache.plan(job.trace.blocks, NAMESPACE))
        if row is None:
            return
        self.waiting.popleft()
        self.running += 1
        self._prefilling = True
        job.hit_tokens = row.hit_tokens * BLOCK
        new = job.trace.input_tokens - job.hit_tokens
        self.computed_tokens += new
        done = self._agenda.now + new / (PREFILL_RATE * self._strength)
        self._agenda.at(done, lambda: self._prefilled(job))
        self._tell()

    def _prefilled(self, job: Job) -> None:
        self._prefilling = False
        self.ttft.append(self._agenda.now - job.arrived)
        self.cache.commit(job.id, job.trace.input_tokens // BLOCK)
        self._tell()
        done = self._agenda.now + job.trace.output_tokens * TOKEN_TIME
        self._agenda.at(done, lambda: self._ended(job))
        self._start()

    def _ended(self, job: Job) -> None:
        self.running -= 1
        self.cache.release(job.id)
        job.done(job.hit_tokens)
        self._start()

    def _tell(self) -> None:
        if self._places:
            self._publish(Changes.of(self._places))
            self._places = {}
