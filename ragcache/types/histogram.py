"""Counts by size."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Observations by size: `counts[i]` of them are at most `bounds[i]`, the last ones above all.

    `total` is their sum. One thread observes; others read copies that it makes.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        """The same counts, which change no more."""
        copy = Histogram(self.bounds)
        copy.counts, copy.total = self.counts.copy(), self.total
        return copy
