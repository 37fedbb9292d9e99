"""A request whose prompt is tokenized, on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ragcache.prefix.explain import History
from ragcache.prompt.layout import TokenizedPrompt
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.serving.breakpoints import PlacedBreakpoints
from ragcache.serving.explainer import Explainer
from ragcache.types import TTL_SECONDS, Breakpoint, ChatPrompt, GenerateRequest


@dataclass(frozen=True)
class Prompted:
    """A request on its way through the engine, with what is known of its prompt.

    What depends on the layout is found when first asked for: mostly while the model runs already.
    """

    request: GenerateRequest
    prompt: TokenizedPrompt
    namespace: bytes
    room: int  # output tokens that fit in the context behind the prompt
    block_size: int
    tokenizer: TokenizerPool
    history: History | None  # None with prefix caching off
    generation: int  # of the history, before the prompt is looked up in the cache

    @cached_property
    def breakpoints(self) -> PlacedBreakpoints:
        """The cache markers as places in the prompt."""
        layout = self.prompt.layout()
        tools_end = max((part.end for part in layout.segments if part.name == "tools"), default=0)
        return PlacedBreakpoints(self._wanted, layout.breakpoints, self.block_size, tools_end)

    @cached_property
    def explainer(self) -> Explainer | None:
        """Explains the hit; None with prefix caching off."""
        if self.history is None:
            return None
        segments = self.prompt.layout().segments
        return Explainer(
            self.history,
            self.tokenizer,
            self.request,
            self.prompt,
            self.history.fingerprint(
                self.namespace, self.prompt.packed(), segments, self.generation
            ),
            self.retentions,
            self.cacheable,
        )

    @property
    def retentions(self) -> tuple[tuple[int, float], ...]:
        """See `PlacedBreakpoints.retentions`."""
        is_kept = any(TTL_SECONDS[marker.ttl] for marker in self._wanted)
        return self.breakpoints.retentions() if is_kept else ()

    @property
    def cacheable(self) -> int | None:
        """The tokens that explicit caching leaves to the cache, None for all."""
        return self.breakpoints.reach if self.request.explicit_caching else None

    @property
    def _wanted(self) -> Sequence[Breakpoint]:
        prompt = self.request.prompt
        return prompt.breakpoints if isinstance(prompt, ChatPrompt) else ()
