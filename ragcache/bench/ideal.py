"""The best hit rate that any prefix cache could have reached on the same requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class IdealCache:
    """A prefix cache of unlimited memory, which knows each request from the moment it starts.

    Deliberately not the engine's own index: a figure to judge that index by must not come
    from it.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._children: dict[tuple[int, tuple[int, ...]], int] = {}

    def hit_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens of the longest known prefix in whole blocks, at most `len(prompt) - 1`."""
        node = hits = 0
        for block in self._blocks(prompt[:-1]):
            child = self._children.get((node, block))
            if child is None:
                break
            node, hits = child, hits + self.block_size
        return hits

    def add(self, tokens: Sequence[int]) -> None:
        """Know all whole blocks of `tokens` from now on."""
        node = 0
        for block in self._blocks(tokens):
            node = self._children.setdefault((node, block), len(self._children) + 1)

    def _blocks(self, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        whole = len(tokens) - len(tokens) % self.block_size
        for start in range(0, whole, self.block_size):
            yield tuple(tokens[start : start + self.block_size])


def ideal_hits(
    requests: Iterable[tuple[Sequence[int], Sequence[int]]], block_size: int
) -> list[int]:
    """Ideal hit tokens of each request, in the order in which they were sent.

    A request is (its prompt, all tokens that were computed for it: the prompt and the answer
    but for the last sampled token, which is never fed to the model). It counts as known to all
    that were sent later, finished or not: an engine may let a request wait for one in flight
    that computes the same prefix.
    """
    cache = IdealCache(block_size)
    hits = []
    for prompt, computed in requests:
        hits.append(cache.hit_tokens(prompt))
        cache.add(computed)
    return hits
