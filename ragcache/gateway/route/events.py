"""Server-sent events that pass through as bytes, and the little that is read in answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

_END = b"\n\n"


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


def data(events: bytes) -> Iterator[bytes]:
    """The data of whole events, each of which has one line of it."""
    return (event.partition(b"data: ")[2] for event in events.split(_END) if b"data: " in event)


def reported_hits(body: bytes) -> int | None:
    """The cached tokens that the usage in a body, or in an event's data, tells; None without."""
    said = _read(body, b'"usage"')
    usage = _object(said, "usage") or _object(_object(said, "message"), "usage")
    details = _object(usage, "prompt_tokens_details")
    hits = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    return hits if isinstance(hits, int) else None


def error_code(body: bytes) -> str | None:
    """The code of the error that a body, or an event's data, tells; None without."""
    return _object(_read(body, b'"error"'), "error").get("code")


def _read(body: bytes, member: bytes) -> Any:
    """The JSON; None where it lacks a member: a quotation mark inside of a text is escaped."""
    if member not in body:
        return None
    try:
        return from_json(body)
    except ValueError:  # then it is not from one of our replicas
        return None


def _object(parent: Any, member: str) -> dict[str, Any]:
    found = parent.get(member) if isinstance(parent, dict) else None
    return found if isinstance(found, dict) else {}
