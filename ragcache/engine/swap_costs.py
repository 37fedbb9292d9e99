"""What swapping blocks in costs on this machine, against computing them anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ragcache.engine.batch import BatchBuilder
from ragcache.engine.host_pool import HostPool
from ragcache.engine.request import Chunk, Request, Sequence
from ragcache.engine.runner import Runner
from ragcache.prefix.cache import PrefixCache
from ragcache.types import SamplingParams

TOKENS = 256  # of the chunk that is measured: enough for the rate of long ones, and soon done


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Seconds: `overhead` of a swap in as such, and of each block to swap it or to compute it."""

    overhead: float
    swap: float
    compute: float

    @property
    def min_swap(self) -> int | None:
        """The fewest blocks that are cheaper to swap in than to compute; None: any are not."""
        gain = self.compute - self.swap
        return int(self.overhead / gain) + 1 if gain > 0 else None

    def __str__(self) -> str:
        overhead, swap, compute = 1e3 * self.overhead, 1e3 * self.swap, 1e3 * self.compute
        return (
            f"swap in {overhead:.3g} ms + {swap:.3g} ms a block, compute {compute:.3g} ms a block"
        )


def measure(
    runner: Runner, host: HostPool, *, num_blocks: int, block_size: int, max_tokens: int
) -> SwapCosts:
    """Measure with a chunk of at most `max_tokens`, before anything is in the `num_blocks` blocks.

    It and the swaps overwrite the pools.
    """
    blocks = max(1, min(num_blocks, host.num_blocks, min(max_tokens, TOKENS) // block_size))
    tokens = min(blocks * block_size, max_tokens)
    cache = PrefixCache(blocks, block_size, share=False)
    sequence = Sequence(Request("", [0] * tokens, SamplingParams(1), b"", frozenset()), 0)
    cache.admit(sequence.row, cache.plan(sequence.tokens, b""))
    chunk = Chunk(sequence, 0, tokens)
    batch = BatchBuilder(cache).build([chunk])
    compute = _seconds(lambda: runner.run(batch), repeats=1)
    one = _seconds(lambda: host.swap_in([(0, 0)]))
    run = _seconds(lambda: host.swap_in([(i, i) for i in range(blocks)]))
    swap = max(run - one, 0) / (blocks - 1) if blocks > 1 else one
    return SwapCosts(max(one - swap, 0), swap, compute / tokens * block_size)


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The shortest time that it takes, after a first time that does not count."""
    work()
    return min(_timed(work) for _ in range(repeats))


def _timed(work: Callable[[], object]) -> float:
    _synchronize()
    started = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
