"""How many requests run at once in a memory, and how much of it they leave empty.

Every step gives each running request a token; there are always more waiting. When the memory is
full, the request that came last gives way and starts again later, as in the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ragcache.bench.lengths import Lengths
from ragcache.bench.report.memory import Job, Memory, Slots

WARM_UP = 0.25  # of the steps: requests all begin together, and need time to mix
VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Usage:
    """Means over steps: running requests, and shares of all slots by what is in them."""

    running: float
    tokens: float
    to_come: float
    unused: float
    free: float

    @property
    def waste(self) -> float:
        """Share of the reserved slots that hold no token."""
        return 1 - self.tokens / (1 - self.free)


def jobs(lengths: Lengths, seed: int) -> Iterator[Job]:
    """Requests without end."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(lengths.shared)]
    name = 0
    while True:
        own, output = lengths.draw(rng)
        tokens = shared + [rng.randrange(VOCAB_SIZE) for _ in range(own)]
        yield Job(name, tokens, len(tokens) + output, lengths.longest)
        name += 1


def pack(
    memory: Memory,
    lengths: Lengths,
    lifetimes: int,
    *,
    seed: int,
    most: int | None = None,
    watch: Callable[[list[Job]], object] = lambda running: None,
) -> Usage:
    """Run requests, at most `most` at once, while `lifetimes` of mean answers follow each other.

    `watch` sees the running requests in all steps that count.
    """
    steps = lifetimes * lengths.mean_output
    seen: list[tuple[int, Slots]] = []
    for step, running in enumerate(_play(memory, jobs(lengths, seed), most)):
        if step >= WARM_UP * steps:
            seen.append((len(running), memory.slots(running)))
            watch(running)
        if step + 1 >= steps:
            break

    def mean(value: Callable[[Slots], int]) -> float:
        return sum(value(slots) / slots.total for _, slots in seen) / len(seen)

    return Usage(
        running=sum(count for count, _ in seen) / len(seen),
        tokens=mean(lambda slots: slots.tokens),
        to_come=mean(lambda slots: slots.to_come),
        unused=mean(lambda slots: slots.unused),
        free=mean(lambda slots: slots.free),
    )


def _play(memory: Memory, waiting: Iterator[Job], most: int | None) -> Iterator[list[Job]]:
    """The running requests after each step."""
    running: list[Job] = []
    queue = [next(waiting)]
    while True:
        while (most is None or len(running) < most) and memory.start(queue[-1]):
            running.append(queue.pop())
            queue = queue or [next(waiting)]
        if not running:
            raise ValueError("the memory is too small for a request")
        yield running
        for job in running.copy():
            if job in running:  # else it has given way
                _advance(memory, job, running, queue)


def _advance(memory: Memory, job: Job, running: list[Job], queue: list[Job]) -> None:
    if not job.to_come:
        memory.end(job)
        running.remove(job)
        return
    job.tokens.append(0)
    while not memory.grow(job):
        last = running.pop()
        memory.end(last)
        queue.append(last)
        if last is job:
            return
