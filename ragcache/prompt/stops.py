"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache.errors import InvalidRequest


class StopStrings:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    Of several that end at the same character the longest counts, so that no part of a stop
    string is ever in the text. For a text t as a whole this is the stop s with the smallest
    t.find(s) + len(s), and the text before it. Only what may become a stop string is kept back.
    Raises InvalidRequest for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequest("stop strings must not be empty", param="stop")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that is now certain, and the stop string once there is one."""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        safe = min((_safe_length(text, stop) for stop in self._stops), default=len(text))
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """Return what was kept back: it did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _safe_length(text: str, stop: str) -> int:
    """Length of `text` without the longest end of it that a proper prefix of `stop` matches."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)
