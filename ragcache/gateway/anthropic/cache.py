"""Cache markers (`cache_control`): where they may stand, and the rules they must obey.

The rules are those of Anthropic's prompt caching guide: at most four markers, those with the
longer ttl first. Two are relaxed, since hits come from a match of all tokens and not from the
markers: there is no minimum length but one block, and no limit to how far back a hit is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ragcache.errors import InvalidRequest
from ragcache.gateway.fields import Fields
from ragcache.types import Breakpoint

MAX_MARKERS = 4


class CacheControl(Fields):
    """A marker: the prompt up to the end of the block that carries it is to stay cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Spot(NamedTuple):
    """The end of a block that may carry a marker; `message` and `end` are `Breakpoint`'s."""

    path: str  # of the block in the request
    marker: CacheControl | None
    message: int | None
    end: int | None


class _Mark(NamedTuple):
    path: str  # of the cache_control
    breakpoint: Breakpoint


def breakpoints(
    spots: Sequence[Spot], automatic: CacheControl | None = None
) -> tuple[Breakpoint, ...]:
    """The breakpoints of a request, whose `spots` are in the order of the prompt.

    `automatic` is the request's own marker: it goes to the last spot. Raises InvalidRequest.
    """
    marks = [
        _Mark(f"{spot.path}.cache_control", Breakpoint(spot.message, spot.end, spot.marker.ttl))
        for spot in spots
        if spot.marker is not None
    ]
    if automatic is not None and spots:
        marks += _automatic(spots[-1], automatic)
    if len(marks) > MAX_MARKERS:
        raise _refused(
            marks[-1].path, f"at most {MAX_MARKERS} blocks may be marked, found {len(marks)}"
        )
    _require_order(marks)
    return tuple(mark.breakpoint for mark in marks)


def _automatic(last: Spot, marker: CacheControl) -> list[_Mark]:
    if last.marker is None:
        place = Breakpoint(last.message, last.end, marker.ttl, "top_level")
        return [_Mark("cache_control", place)]
    if last.marker.ttl != marker.ttl:
        raise _refused("cache_control", f"the last block, {last.path}, is marked with another ttl")
    return []


def _require_order(marks: Sequence[_Mark]) -> None:
    shorter = None
    for path, place in marks:
        if place.ttl == "5m":
            shorter = shorter or path
        elif shorter is not None:
            raise _refused(
                f"{path}.ttl",
                f"a '1h' marker must not come after a '5m' marker, here {shorter} "
                "(in the order tools, system, messages)",
            )


def _refused(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {why}", param=path)
