"""Snapshots of the engine: what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ragcache.types.histogram import Histogram


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """KV blocks by state; free + cached + held = total."""

    free: int
    cached: int
    held: int

    @property
    def total(self) -> int:
        """All physical blocks of the pool."""
        return self.free + self.cached + self.held


@dataclass(frozen=True, slots=True)
class HostStats:
    """A snapshot of the host tier: its blocks by state, counters since its start.

    `hit_tokens` are those of the engine's hit tokens whose KV was swapped in. `evictions` are
    blocks that were forgotten.
    """

    pool: PoolCounts
    hit_tokens: int
    evictions: int
    swapped_out: int  # blocks
    swapped_in: int


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that prompts share: a branch of the prefix tree, down to its last block.

    `name` is that of its last block, `parent` that of the branch which it goes on from, None for
    a branch from a root. `hits` counts the prompts that read all of its `tokens` since they were
    cached; `hit_tokens` the tokens that any prompt read from its own blocks, without its parents',
    so these add up. `published_at` and `kept_until` (None: not retained) belong to its last block,
    on time.monotonic.
    """

    name: bytes
    parent: bytes | None
    tokens: int
    hits: int
    hit_tokens: int
    published_at: float
    kept_until: float | None


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds in the life of the device's blocks.

    `lifetime` is from where a block could be found to its eviction, `idle_before_evict` the last
    part of it, since a request let go of it. `reuse_gap` is for how long a prefix that is hit lay
    idle before.
    """

    lifetime: Histogram
    idle_before_evict: Histogram
    reuse_gap: Histogram


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine: requests by state, blocks by state, counters since its start.

    Every prompt token is counted once, at admission, in `query_tokens`, and there in
    `hit_tokens` too when its KV came from the cache. `computed_tokens` are the tokens that went
    through the model, those of a request resumed after preemption again, and drafts. `pool` and
    `evictions` are the device's. Of the `drafted_tokens` that were tried ahead, `accepted_tokens`
    were right. `prefill_rate` is the most tokens that have been computed in a second.
    """

    running: int
    waiting: int
    pool: PoolCounts
    block_size: int
    query_tokens: int
    hit_tokens: int
    evictions: int
    preemptions: int
    computed_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_rate: float = 0.0  # 0 before the first step
    retained: int = 0  # blocks, held or cached, that a breakpoint keeps
    host: HostStats | None = None
    block_times: BlockTimes | None = None
    step_tokens: Histogram | None = None  # tokens of each step
    step_seconds: Histogram | None = None  # of each step, or several, until something is sampled

    def ended(self) -> EngineStats:
        """What is left when the engine ends: its counters; nothing runs, waits or is cached."""
        empty = PoolCounts(0, 0, 0)
        host = self.host and replace(self.host, pool=empty)
        return replace(self, running=0, waiting=0, pool=empty, retained=0, host=host)


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """How well the other replicas are informed about this one.

    `published` and `dropped` count changes of blocks; those dropped are told by a snapshot.
    `lag_seconds` is how old what they know may be.
    """

    connected: bool
    published: int
    dropped: int
    lag_seconds: float
