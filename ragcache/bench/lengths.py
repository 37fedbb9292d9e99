"""Lengths of prompts and answers, drawn like those that papers report; equal for equal seeds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

LONGEST = 2048  # tokens of a prompt and its answer, as in arXiv 2309.06180


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of prompts and answers, behind `shared` tokens that all prompts begin with."""

    name: str
    mean_input: int
    mean_output: int
    shared: int = 0

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        return LONGEST + self.shared

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Tokens of a prompt, without the shared ones, and of its answer."""
        own = min(token_count(rng, self.mean_input), LONGEST - 1)
        return own, min(token_count(rng, self.mean_output), LONGEST - own)


# The means are those of arXiv 2309.06180.
SHAREGPT = Lengths("ShareGPT-like", 161, 338)
ALPACA = Lengths("Alpaca-like", 19, 58)


def token_count(rng: random.Random, mean: int) -> int:
    """Log-normal with sigma 1, at least one."""
    return max(1, round(rng.lognormvariate(math.log(mean) - 0.5, 1)))
