"""Cold against warm, with the control that tells prefix hits from a server that warms up.

The order is A cold, A warm, B cold, B warm. Were the second request fast only because compilers
and allocators have settled, B cold would be fast too.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ragcache.bench.client import ChatClient, Reply
from ragcache.bench.figures import ProbeFigures, summarise_probe
from ragcache.bench.prose import prose

CountTokens = Callable[[list[Mapping[str, str]]], int]
Salt = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Probe:
    """Sends the probe; `shared` salts what may hit, `unique` what must not (None: cannot)."""

    client: ChatClient
    count_tokens: CountTokens
    prompt_tokens: int
    shared: Salt
    unique: Salt | None
    on_reply: Callable[[], None]

    async def run(self, rng: random.Random, repeats: int) -> ProbeFigures:
        """Median over `repeats` rounds, each with new texts."""
        return summarise_probe([await self._round(rng) for _ in range(repeats)])

    async def _round(self, rng: random.Random) -> dict[str, Reply]:
        replies: dict[str, Reply] = {}
        for name in ("a", "b"):
            text = self._text(rng)
            replies[f"{name}_cold"] = await self._ask(text, "1", self.shared)
            replies[f"{name}_warm"] = await self._ask(text, "2", self.shared)
        if self.unique:
            replies["off"] = await self._ask(text, "2", self.unique)
        return replies

    async def _ask(self, text: str, question: str, salt: Salt) -> Reply:
        reply = await self.client.ask(_messages(text, question), 1, salt())
        self.on_reply()
        return reply

    def _text(self, rng: random.Random) -> str:
        """New prose that fills the prompt up to `prompt_tokens`, within a word.

        It starts with a random word, for sentences that happen to begin alike would be a hit.
        """
        words = [f"{rng.getrandbits(64):x}", *prose(rng, self.prompt_tokens).split()]

        def size(n: int) -> int:
            return self.count_tokens(_messages(" ".join(words[:n]), "1"))

        fits = bisect.bisect_right(range(len(words)), self.prompt_tokens, key=size)
        return " ".join(words[: max(fits - 1, 1)])


def _messages(text: str, question: str) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": f"{text}\n\nQuestion {question}"}]
