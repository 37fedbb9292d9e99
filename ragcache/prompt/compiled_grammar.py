"""What outputs may be, as the engine follows it."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ragcache.errors import GenerationFailed
from ragcache.prompt.grammar_probe import failure_of


class GrammarConstraint:
    """The state of one choice in its grammar; the engine's `Constraint`."""

    def __init__(self, matcher: LLMatcher, grammar: CompiledGrammar) -> None:
        self._matcher = matcher
        self._grammar = grammar

    def fill_mask(self, bits: NDArray[np.int32]) -> None:
        """Set the bits of the allowed tokens in `bits` `[ceil(V / 32)]`, clear all others."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def advance(self, token_id: int) -> None:
        """Go on behind an allowed token, which may be an end token.

        Raises:
            GenerationFailed: when the grammar has become too complex to be followed any
                further, or does not allow the token.
        """
        if not self._matcher.consume_token(token_id):
            self._grammar.failure = failure_of(self._matcher)
            message = f"the grammar of the output cannot be followed: {self._grammar.failure}"
            raise GenerationFailed(message)
        self._grammar.followed |= self.finished

    def forced(self) -> list[int]:
        """Tokens that must come next, maybe none; goes on behind them."""
        tokens = self._matcher.compute_ff_tokens()
        taken = tokens[: self._matcher.try_consume_tokens(tokens)]
        self._grammar.followed |= self.finished
        return taken

    @property
    def finished(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class CompiledGrammar:
    """What the outputs of equal requests may be; the engine's `Grammar`.

    All its states share one automaton, which grows as they need it, up to a limit. Once a state has
    met it, `failure` says so: the grammar goes on, but is of no use to new requests. `followed`
    tells whether any state has come to its end.
    """

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype
        self.failure: str | None = None
        self.followed = False

    def constraint(self) -> GrammarConstraint:
        """A new state, at the start; costs microseconds."""
        return GrammarConstraint(self._prototype.deep_copy(), self)
