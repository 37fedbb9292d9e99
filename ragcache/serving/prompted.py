"""A request whose prompt is tokenized, on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass

from ragcache.prompt.layout import TokenizedPrompt
from ragcache.serving.breakpoints import PlacedBreakpoints
from ragcache.serving.explainer import Explainer
from ragcache.types import GenerateRequest


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request on its way through the engine, with what is known of its prompt."""

    request: GenerateRequest
    prompt: TokenizedPrompt
    breakpoints: PlacedBreakpoints
    explainer: Explainer | None  # None with prefix caching off
    room: int  # output tokens that fit in the context behind the prompt
