"""What the engine knows of a grammar: which tokens may come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """The state of one choice in its grammar. It lives on the engine thread.

    Independent of the KV cache: preemption does not touch it.
    """

    def fill_mask(self, bits: NDArray[np.int32]) -> None:
        """Set bit t % 32 of `bits[t // 32]` for each allowed token t, clear all others.

        `bits` is `[ceil(V / 32)]`. At least one token is allowed unless `finished`. Of a grammar
        that can be followed no further, any bits will do: `advance` raises.
        """

    def advance(self, token_id: int) -> None:
        """Go on behind an allowed token, which may be an end token.

        Raises:
            GenerationFailed: when the grammar can be followed no further.
        """

    def forced(self) -> list[int]:
        """Tokens that must come next, maybe none; goes on behind them."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow but the end."""


class Grammar(Protocol):
    """A compiled grammar, shared by the choices of a request."""

    def constraint(self) -> Constraint:
        """A new state, at the start."""
