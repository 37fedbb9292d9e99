from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import pytest

from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.names import namespace_name, owner_name
from ragcache.prefix.rows import Row


class Clock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class SmallCache(PrefixCache):
    """A prefix cache with the shortcuts and the insight that tests want."""

    tenant = namespace_name(owner_name("model", "tenant"))

    def start(self, request_id: Hashable, tokens: Sequence[int], tenant: bytes = tenant) -> Row:
        """Admit a prompt that must fit."""
        row = self.admit(request_id, self.plan(tokens, tenant))
        assert row is not None
        return row

    def run(self, request_id: Hashable, tokens: Sequence[int], tenant: bytes = tenant) -> Row:
        """Admit a prompt and compute all of it, after what is to be swapped for it."""
        row = self.start(request_id, tokens, tenant)
        self.run_swaps()
        self.commit(request_id, len(tokens))
        return row

    def run_swaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Let the swaps of a step run; returns those out and those in."""
        swaps = self.take_swaps()
        self.copies_done()
        return swaps

    def serve(self, tokens: Sequence[int], tenant: bytes = tenant) -> int:
        """Run a prompt to its end; returns its hit tokens."""
        hit_tokens = self.run("served", tokens, tenant).hit_tokens
        self.release("served")
        return hit_tokens

    def hit(self, tokens: Sequence[int], tenant: bytes = tenant) -> int:
        return self.plan(tokens, tenant).hit_tokens

    def queue(self) -> list[int]:
        """Ids from the next block to be taken to the last."""
        return [block.id for block in self._store.pool.queue()]

    def refs(self) -> list[int]:
        return [block.ref_count for block in self._store.pool.blocks]

    def published(self) -> list[int]:
        return [block.id for block in self._store.pool.blocks if block.parent is not None]

    def kept(self) -> dict[int, float]:
        """Retained blocks by id, each with the time until which it is."""
        return {b.id: b.keep_until for b in self._store.pool.blocks if b.keep_ttl}

    def tenants(self) -> set[bytes]:
        return set(self._store.index.roots)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_cache(clock: Clock) -> Iterator[Callable[..., SmallCache]]:
    """Make caches, by default of ten blocks of four tokens; each is checked at the end."""
    made: list[SmallCache] = []

    def make(num_blocks: int = 10, block_size: int = 4, **options: Any) -> SmallCache:
        made.append(SmallCache(num_blocks, block_size, clock=clock, **options))
        return made[-1]

    yield make
    for cache in made:
        cache.check()


@pytest.fixture
def cache(make_cache: Callable[..., SmallCache]) -> SmallCache:
    return make_cache()
