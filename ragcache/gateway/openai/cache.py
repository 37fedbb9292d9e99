"""OpenAI's prompt caching fields, and Anthropic's marker where clients send it on this route.

OpenAI writes at most four breakpoints of a request: the automatic one at the end of the
conversation, unless the mode is `explicit`, and the latest explicit ones. A marker is never an
error for where it stands, since one that cannot be used costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import Field

from ragcache.gateway.fields import Fields
from ragcache.types import Breakpoint

MAX_BREAKPOINTS = 4

Ttl = Literal["5m", "30m", "1h", "12h"]


class CacheControl(Fields):
    """Anthropic's marker."""

    type: Literal["ephemeral"]
    ttl: Ttl = "5m"


class PromptCacheBreakpoint(Fields):
    """OpenAI's marker; without a ttl, that of the request holds."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class PromptCacheOptions(Fields):
    """`prompt_cache_options`."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Ttl | None = None


class CacheFields(Fields):
    """The top-level fields. `prompt_cache_key` only routes: it separates no caches."""

    cache_control: CacheControl | None = None
    prompt_cache_key: str | None = Field(None, max_length=1024)
    prompt_cache_options: PromptCacheOptions = PromptCacheOptions()
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    @property
    def explicit_caching(self) -> bool:
        """Whether only what lies before a breakpoint may be cached."""
        return self.prompt_cache_options.mode == "explicit"

    @property
    def explicit_ttl(self) -> Ttl:
        """The ttl of OpenAI's markers that have none of their own."""
        return self.prompt_cache_options.ttl or "30m"

    def breakpoints(self, explicit: Iterable[Breakpoint], last: int) -> tuple[Breakpoint, ...]:
        """Those to be written, of `explicit` and the automatic one after message `last`."""
        automatic = list(self._automatic(last))
        return (*list(explicit)[len(automatic) - MAX_BREAKPOINTS :], *automatic)

    def _automatic(self, last: int) -> Iterator[Breakpoint]:
        if self.cache_control is not None:
            yield Breakpoint(last, None, self.cache_control.ttl, "top_level")
        elif not self.explicit_caching:
            yield Breakpoint(last, None, self._implicit_ttl, "implicit")

    @property
    def _implicit_ttl(self) -> str:
        retained = "12h" if self.prompt_cache_retention == "24h" else "auto"
        return self.prompt_cache_options.ttl or retained
