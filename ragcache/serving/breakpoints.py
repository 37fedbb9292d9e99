"""A request's cache markers as token positions: what they keep, write and find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ragcache.types import TTL_SECONDS, Breakpoint


class PlacedBreakpoint(NamedTuple):
    """A marker behind the first `tokens` tokens of the prompt."""

    tokens: int
    ttl: str
    origin: str


class PlacedBreakpoints:
    """The markers of one prompt in the order of the request; each covers those before it.

    Only whole blocks can be kept, so a marker counts up to the last block that ends before it.
    On the wire the tools come first, so a marker in a message covers the tools too, also where
    the template writes them further down: `tools_end` tokens.
    """

    def __init__(
        self,
        breakpoints: Sequence[Breakpoint],
        positions: Sequence[int | None],
        block_size: int,
        tools_end: int = 0,
    ) -> None:
        self._placed: list[PlacedBreakpoint] = []
        self._block_size = block_size
        reach = 0
        for marker, position in zip(breakpoints, positions, strict=True):
            if position is None:
                continue  # the template left its place out
            reach = max(reach, position, 0 if marker.message is None else tools_end)
            self._placed.append(PlacedBreakpoint(reach, marker.ttl, marker.origin))

    @property
    def reach(self) -> int:
        """Tokens before the last marker."""
        return self._placed[-1].tokens if self._placed else 0

    def retentions(self) -> tuple[tuple[int, float], ...]:
        """Tokens to keep, and for how many seconds."""
        timed = ((place.tokens, TTL_SECONDS[place.ttl]) for place in self._placed)
        return tuple((tokens, seconds) for tokens, seconds in timed if seconds)

    def written(self, hit_tokens: int) -> dict[str, int]:
        """Tokens up to the markers that were not in the cache, by ttl.

        What lies between two markers belongs to the second (Anthropic's rule for mixed ttls).
        """
        written: dict[str, int] = {}
        done = hit_tokens
        for place in self._placed:
            whole = self._whole(place)
            if whole > done:
                written[place.ttl] = written.get(place.ttl, 0) + whole - done
                done = whole
        return written

    def outcomes(self, hit_tokens: int) -> Iterator[tuple[str, str]]:
        """Each marker's origin, and `hit`, `miss` or `too_short`."""
        for place in self._placed:
            whole = self._whole(place)
            found = "hit" if whole <= hit_tokens else "miss"
            yield place.origin, found if whole else "too_short"

    def _whole(self, place: PlacedBreakpoint) -> int:
        return place.tokens // self._block_size * self._block_size
