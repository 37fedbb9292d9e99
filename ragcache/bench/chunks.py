"""Sequences in the middle of their prompts, as a benchmark of the engine runs them."""

from __future__ import annotations

from ragcache.engine.request import Chunk, Request, Sequence
from ragcache.prefix.cache import PrefixCache
from ragcache.types import SamplingParams


def admitted(cache: PrefixCache, batch: int, context: int, query: int) -> list[Chunk]:
    """For each of `batch` sequences the next `query` tokens, behind `context` computed ones."""
    return [_chunk(cache, str(index), context, query) for index in range(batch)]


def _chunk(cache: PrefixCache, name: str, context: int, query: int) -> Chunk:
    prompt = [1] * (context + query)
    sequence = Sequence(Request(name, prompt, SamplingParams(1), b"", frozenset()), 0)
    cache.admit(sequence.row, cache.plan(prompt, b""))
    sequence.num_computed = context
    return Chunk(sequence, context, query)
