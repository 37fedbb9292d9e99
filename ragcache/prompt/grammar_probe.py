"""Whether outputs can follow a grammar: compiling alone does not show it."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer

_STEPS = 96
_PERIOD = 24  # steps from one property to the next


class GrammarProbe:
    """Follows a grammar for some steps, and so meets limits that any output would meet.

    Mostly with the last token allowed, which is a long one; now and then strings are closed and
    the next property is begun, where that is allowed.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        quote, comma = (tokenizer.tokenize_str(text)[-1] for text in '",')
        self._preferred = {_PERIOD - 1: quote, 0: comma}

    def follow(self, matcher: LLMatcher, opening: str = "") -> None:
        """Advance `matcher` from behind `opening`, or as far into it as the grammar allows.

        Raises:
            ValueError: when the grammar is invalid, allows nothing, or cannot be followed.
        """
        matcher.try_consume_tokens(self._tokenizer.tokenize_str(opening, parse_special=True))
        for step in range(_STEPS):
            token = self._choose(matcher, self._preferred.get(step % _PERIOD))
            if token is None:
                break
            matcher.consume_token(token)
            matcher.try_consume_tokens(matcher.compute_ff_tokens())
        if matcher.is_error():
            raise ValueError(failure_of(matcher))

    def _choose(self, matcher: LLMatcher, preferred: int | None) -> int | None:
        """An allowed token that does not end the output; None when there is none."""
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32).copy()
        for end in self._tokenizer.eos_tokens:
            words[end // 32] &= ~np.uint32(1 << end % 32)
        if preferred is not None and words[preferred // 32] >> preferred % 32 & 1:
            return preferred
        used = np.flatnonzero(words)
        return 32 * int(used[-1]) + int(words[used[-1]]).bit_length() - 1 if used.size else None


def failure_of(matcher: LLMatcher) -> str:
    """The library's message, without a stack or the state of the parser."""
    message = matcher.get_error().split("\n<", 1)[0]
    if message.startswith("NoExtension"):
        return "there is nothing that it allows"
    return "too large" if message.startswith("panic") else message
