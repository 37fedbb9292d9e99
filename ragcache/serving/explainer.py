"""Why a prompt was found in the cache as far as it was."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ragcache.prefix.explain import History
from ragcache.prefix.fingerprint import Fingerprint
from ragcache.prompt.layout import TokenizedPrompt
from ragcache.prompt.tokenize import TokenizerPool
from ragcache.types import Explanation, GenerateRequest, MissReason

log = logging.getLogger(__name__)

_PLACED = {MissReason.CHANGED, MissReason.BELOW_BLOCK}  # where the place says what to mend


@dataclass(frozen=True, slots=True)
class Explainer:
    """Explains the hit of one request by the prompts before it, and remembers it for those after.

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
        if explanation.reason in _PLACED:
            explanation = replace(explanation, character=await self._character(explanation))
        self.history.remember(self.request.id, self.fingerprint, explanation)
        return explanation

    def computed(self) -> None:
        """The prompt can be found by later ones from now on."""
        self.history.computed(self.request.id, self.retentions, self.cacheable)

    async def _character(self, explanation: Explanation) -> int | None:
        if explanation.token is None:
            return None
        try:
            _, character = await self.tokenizer.place(self.prompt, explanation.token)
        except Exception:  # an answer must not fail because its explanation does
            log.exception("%s: the place of token %d", self.request.id, explanation.token)
            return None
        return character
