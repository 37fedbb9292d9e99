"""From a prompt's hit to the explanation of its misses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ragcache.prefix.explain import History
from ragcache.prefix.fingerprint import Fingerprint
from ragcache.prompt.layout import TokenizedPrompt
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.types import Explanation, GenerateRequest


@dataclass(frozen=True, slots=True)
class Trail:
    """What one request leaves in the history of prompts, and reads from it.

    `retentions` are its breakpoints as (tokens, seconds), `cacheable` the tokens that explicit
    caching leaves to the cache, None for all.
    """

    history: History
    tokenizer: TokenizerPool
    request: GenerateRequest
    prompt: TokenizedPrompt
    fingerprint: Fingerprint
    retentions: tuple[tuple[int, float], ...]
    cacheable: int | None

    async def explain(self, hit_tokens: int) -> Explanation:
        """Compare the prompt with earlier ones, then remember it as one of them."""
        computed_anew = self.request.sampling.prompt_logprobs is not None
        explanation = self.history.compare(
            self.fingerprint,
            hit_tokens,
            self.request.previous_id,
            limit=0 if computed_anew else self.cacheable,
        )
        if explanation.token is not None:
            _, character = await self.tokenizer.place(self.prompt, explanation.token)
            explanation = replace(explanation, character=character)
        self.history.remember(self.request.id, self.fingerprint, explanation)
        return explanation

    def computed(self) -> None:
        """The prompt can be found by later ones from now on."""
        self.history.computed(self.request.id, self.retentions, self.cacheable)
