"""Server-sent events that pass through as bytes."""

from __future__ import annotations

import re

_END = b"\n\n"
_REPORTED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)')


class WholeEvents:
    """Cuts a stream into whole events, so that whatever ends it can be followed by an event."""

    def __init__(self) -> None:
        self.rest = b""  # the beginning of an event

    def feed(self, data: bytes) -> bytes:
        """Add what has come; returns the events that are complete."""
        whole, end, self.rest = (self.rest + data).rpartition(_END)
        return whole + end


def say_nothing(events: bytes) -> bool:
    """Whether these whole events only keep a connection alive: comments and pings."""
    return all(event.startswith((b":", b"event: ping")) for event in events.split(_END) if event)


def reported_hits(body: bytes) -> int | None:
    """The cached tokens that the usage in a body or in events tells, None where there is none.

    A quotation mark inside of a text is escaped, so it is never taken for a usage.
    """
    found = _REPORTED.search(body)
    return int(found[1]) if found else None
