"""How long calls take, and how fast a device moves bytes and multiplies at best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Self

import torch

Call = Callable[[], object]

FLUSHED = 1 << 31  # bytes
# Bytes of a copy, more than any cache holds, and rows of a square product.
COPIED = {"cuda": 1 << 30, "cpu": 1 << 28}
MULTIPLIED = {"cuda": 8192, "cpu": 1024}


class Clock:
    """Takes the time of calls on one device.

    On a GPU it is taken there, between two events. Before each call much memory is written: that
    empties the caches, as the other layers of a model would, and keeps the GPU busy until the
    host has queued all that is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flushed = None
        if device.type == "cuda":
            self._flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device)

    def seconds(self, call: Call) -> float:
        """Seconds of one call."""
        if self._flushed is None:
            started = perf_counter()
            call()
            return perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flushed.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def turns(self, calls: Sequence[Call], rounds: int) -> list[tuple[float, ...]]:
        """Seconds of each call, round by round, after one round that warms up."""
        times = [tuple(self.seconds(call) for call in calls) for _ in range(rounds + 1)]
        return times[1:]

    def median(self, call: Call, rounds: int) -> float:
        """The median of some calls, in seconds."""
        return median(seconds for (seconds,) in self.turns([call], rounds))


@dataclass(frozen=True, slots=True)
class Work:
    """What a call cannot do without."""

    num_bytes: int  # read or written
    flops: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device does at best: bytes that a copy reads and writes, operations of a product."""

    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def measure(cls, clock: Clock, dtype: torch.dtype, rounds: int) -> Self:
        """Time a copy, and a product of two matrices of this dtype."""
        kind = clock.device.type
        source = torch.zeros(COPIED[kind], dtype=torch.uint8, device=clock.device)
        target = torch.empty_like(source)
        copy = clock.median(lambda: target.copy_(source), rounds)
        size = MULTIPLIED[kind]
        one, other = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
        product = clock.median(lambda: one @ other, rounds)
        return cls(2 * COPIED[kind] / copy, 2 * size**3 / product)

    def floors(self, work: Work) -> tuple[float, float]:
        """Seconds that memory alone takes, and that arithmetic alone takes."""
        return work.num_bytes / self.bytes_per_second, work.flops / self.flops_per_second
