"""What became of one request; the log and the traces tell it, and neither tells what was said."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ragcache.types import Explanation, Usage

if TYPE_CHECKING:
    from ragcache.serving.generation import Generation

_LONGEST_PATH = 200  # characters; who sends more is not after one of our routes


@dataclass(slots=True)
class Record:
    """One request, from its arrival to its end.

    `arrival`, `first_token` and `end` are on `time.perf_counter`. `status` is the one that was sent
    or, of a stream that broke off, the one that would have been. `finish_reason` is `error` or
    `abort` where it says more than the model's own. Token counts are the sums over all prompts.
    """

    request_id: str
    method: str
    path: str
    arrival: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    status: int = 0
    finish_reason: str | None = None
    error_type: str | None = None
    api: str | None = None
    tenant: str = ""
    model: str | None = None  # one of the served names, as the client chose it
    served_model: str | None = None
    response_id: str | None = None
    usage: Usage | None = None
    first_token: float | None = None
    explanation: Explanation | None = None  # of the first prompt

    @classmethod
    def of(cls, request: web.Request, request_id: str) -> Record:
        """A request that has just arrived."""
        return cls(request_id, request.method, request.rel_url.raw_path[:_LONGEST_PATH])

    def add(self, generation: Generation) -> None:
        """Take down what one of the request's generations came to."""
        usage, before = generation.usage, self.usage or Usage(0, 0, 0)
        self.usage = Usage(
            before.prompt_tokens + usage.prompt_tokens,
            before.cached_tokens + usage.cached_tokens,
            before.completion_tokens + usage.completion_tokens,
        )
        self.explanation = self.explanation or generation.explanation
        if (first := generation.times.first_token) is not None:
            self.first_token = min(first, self.first_token or first)

    @property
    def duration(self) -> float:
        """Seconds from the arrival to the end."""
        return self.end - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the arrival to the first token, None without one."""
        return None if self.first_token is None else self.first_token - self.arrival

    def fields(self) -> dict[str, Any]:
        """What is known, for a log that is read by programs."""
        known: dict[str, Any] = {
            "request_id": self.request_id,
            "response_id": self.response_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "finish_reason": self.finish_reason,
            "error_type": self.error_type,
            "tenant": self.tenant or None,
            "duration": round(self.duration, 6),
        }
        if (wait := self.time_to_first_token) is not None:
            known["time_to_first_token"] = round(wait, 6)
        known |= self._tokens()
        return {name: value for name, value in known.items() if value is not None}

    def _tokens(self) -> Mapping[str, Any]:
        if self.usage is None:
            return {}
        why = self.explanation
        return {
            "prompt_tokens": self.usage.prompt_tokens,
            "hit_tokens": self.usage.cached_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "miss_reason": why and why.reason,
            "lost_tokens": why and why.lost_tokens,
        }

    def line(self) -> str:
        """The same for people."""
        return ", ".join(self._phrases())

    def _phrases(self) -> Iterator[str]:
        ended = self.error_type or self.finish_reason or ""
        yield f"{self.method} {self.path} {self.status} {ended}".rstrip()
        if self.usage is not None:
            yield f"{self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached"
            yield from _explained(self.explanation)
            yield f"{self.usage.completion_tokens} generated"
        if (wait := self.time_to_first_token) is not None:
            yield f"first token {wait:.3f} s"
        yield f"{self.duration:.3f} s"
        yield from filter(None, (self.response_id, self.request_id))
        if self.tenant:
            yield f"tenant {self.tenant}"


def _explained(why: Explanation | None) -> Iterator[str]:
    """Why a prompt was not found further, without any of its text."""
    if why is None or why.reason is None:
        return
    said = str(why.reason)
    if why.token is not None:
        said += f" in {why.segment} at token {why.token}"
    if why.character is not None:
        said += f" (character {why.character})"
    if why.previous is not None:
        said += f" compared with {why.previous}"
    yield said
    if why.lost_tokens:
        yield f"{why.lost_tokens} lost"


RECORD = web.RequestKey("record", Record)
