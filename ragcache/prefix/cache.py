"""The prefix cache: which request holds which blocks, and which prefixes can be found.

It moves block ids only; the K and V themselves, and the copies it asks for, are the engine's.
The life of a request: `plan` → `admit` → (`grow` → `take_swaps`, `take_copies` → one step →
`copies_done` → `commit`)* → `release`. Not thread-safe: the engine thread owns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from ragcache.prefix import integrity
from ragcache.prefix.blocks import Block
from ragcache.prefix.branches import hottest
from ragcache.prefix.copies import Copies
from ragcache.prefix.events import BlockSink
from ragcache.prefix.host import HostTier
from ragcache.prefix.names import OWNER_BYTES
from ragcache.prefix.rows import Plan, Row
from ragcache.prefix.store import BlockStore
from ragcache.types import BlockTimes, HotPrefix, PoolCounts


class PrefixCache:
    """Shares KV blocks between requests whose prompts begin alike, within a namespace.

    Token lists are kept by reference and may only be appended to while in use. With `share` off
    nothing is ever published, hence nothing found: the control for every measurement. At most
    `retain_share` of the blocks are retained; `clock` counts the seconds of their ttl. Evicted
    blocks move to `host_blocks` blocks in host memory, if there are any, and come back where
    at least `min_swap` of them are hit in a row. `sink` is told which blocks can be found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        share: bool = True,
        retain_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        host_blocks: int = 0,
        min_swap: int = 1,
        sink: BlockSink | None = None,
    ) -> None:
        self.block_size = block_size
        self.share = share
        self._store = BlockStore(
            num_blocks, block_size, retain_share, clock, host_blocks, min_swap, sink
        )
        self._pool = self._store.pool
        self._retention = self._store.retention
        self._residency = self._store.residency
        self._rows: dict[Hashable, Row] = {}
        # Released, but keeping all blocks until those that are swapped in for them have arrived:
        # a swap holds its target only, and whoever holds a block must hold its parents.
        self._leaving: list[Row] = []
        self._copies = Copies(self._pool, self._pool)

    @property
    def generation(self) -> int:
        """Moves when a block is published, evicted, swapped in or dropped: plans may have aged."""
        return self._store.index.generation

    @property
    def available(self) -> int:
        """Blocks that a plan or a row can take now: free + cached."""
        return self._pool.available

    @property
    def evictions(self) -> int:
        """Cached blocks given up by the device to make room, ever; also those that were moved."""
        return self._store.evictions

    @property
    def host(self) -> HostTier:
        """The host tier, for its counts."""
        return self._store.host

    @property
    def retained(self) -> int:
        """Blocks, held or cached, with a retention that has not been found to have run out."""
        return self._retention.count

    def counts(self) -> PoolCounts:
        """Count the device's blocks by state."""
        return self._pool.counts()

    def block_times(self) -> BlockTimes:
        """How long the device's blocks have lived, lain idle, and waited to be hit again."""
        return self._residency.times()

    def plan(self, tokens: Sequence[int], namespace: bytes, limit: int | None = None) -> Plan:
        """Match the longest published prefix of whole blocks; changes nothing.

        At least one token is left to compute, so that there are logits to sample from. At most
        `limit` tokens are hit, if given. `namespace` is a `namespace_name`. Blocks on the host are
        hits where swapping them in is worth it.
        """
        most = max(len(tokens) - 1, 0)
        run = self._store.match(namespace, tokens, most if limit is None else min(limit, most))
        hits, host_hits = self._store.host.split(run)
        return Plan(
            tokens,
            namespace,
            hits,
            host_hits,
            hit_tokens=(len(hits) + len(host_hits)) * self.block_size,
            host_tokens=len(host_hits) * self.block_size,
            blocks_needed=self._blocks_needed(len(tokens), hits),
            generation=self.generation,
            limit=limit,
        )

    def admit(
        self, request_id: Hashable, plan: Plan, publish_limit: int | None = None
    ) -> Row | None:
        """Hold the hits and take the other blocks for all of `plan.tokens`, or change nothing.

        A plan that has aged is made again, so `Row.hit_tokens` is what counts. Of what the row
        computes, only whole blocks among its first `publish_limit` tokens are published, if
        given. Returns None where too few blocks are available; raises ValueError for an id that
        is already running.
        """
        self._require_new(request_id)
        self._retention.expire()
        if plan.generation != self.generation:
            plan = self.plan(plan.tokens, plan.namespace, plan.limit)
        num_tokens = len(plan.tokens)
        if self._blocks_needed(num_tokens, plan.hits) > self._pool.available:
            return None
        self._residency.hit(plan.host_hits or plan.hits)
        self._pool.hold(plan.hits)
        self._retention.refresh(plan.hits)
        table = [block.id for block in plan.hits]
        table += self._store.swap_in(plan.host_hits)
        table += self._store.take(self._blocks(num_tokens) - len(table))
        row = self._rows[request_id] = Row.start(plan, table, publish_limit if self.share else 0)
        return row

    def count_hit(self, request_id: Hashable) -> None:
        """Count the row's hits as one prompt's, for `hottest`; not when it merely resumes.

        Does nothing for an id that is not running: it may have lost its blocks again at once.
        """
        row, blocks = self._rows.get(request_id), self._pool.blocks
        if row is not None:
            for block_id in row.table[: row.hit_tokens // self.block_size]:
                blocks[block_id].hits += 1

    def hottest(self, owner: bytes, count: int) -> list[HotPrefix]:
        """The `count` branches that an owner's prompts hit most often; see `branches.hottest`."""
        return hottest(self._store.index, owner, self.block_size, count)

    def grow(self, request_id: Hashable, num_tokens: int) -> bool:
        """Make the row cover `num_tokens` tokens in all; False, and no change, without room.

        The new tokens are about to be written. Where the first of them would land in a block that
        another row shares (after `fork`), this row gets a copy of it, see `take_copies`.
        """
        row = self._rows[request_id]
        if num_tokens <= row.num_tokens:
            return True
        self._retention.expire()
        shared = self._shared_tail(row)
        new = self._blocks(num_tokens) - len(row.table)
        if new + (shared is not None) > self._pool.available:
            return False
        if shared is not None:
            row.table[-1:] = self._store.take(1)  # our reference to the old one is the copy's
            target = self._pool.blocks[row.table[-1]]
            self._pool.hold([target])
            self._copies.add(shared, target)
        row.table += self._store.take(new)
        row.num_tokens = num_tokens
        return True

    def commit(self, request_id: Hashable, num_computed: int) -> None:
        """Publish the row's whole blocks among its first `num_computed` tokens, now written.

        Where an equal block is published already, the row goes over to it and ours is freed. The
        last sampled token has no KV yet and does not count. Raises ValueError when `num_computed`
        falls, or exceeds what the row covers, and RuntimeError while a copy of such a block is
        still under way.
        """
        row = self._rows[request_id]
        if not row.num_computed <= num_computed <= min(row.num_tokens, len(row.tokens)):
            raise ValueError(f"request {request_id!r} cannot have {num_computed} tokens computed")
        first = row.published_blocks(row.num_computed, self.block_size)
        stop = row.published_blocks(num_computed, self.block_size)
        if first < stop:
            self._store.publish(row.namespace, row.tokens, row.table, first, stop)
        row.num_computed = num_computed

    def fork(self, src: Hashable, dst: Hashable, tokens: Sequence[int]) -> Row:
        """Give the new request `dst` all blocks of `src`, the partly filled last one included.

        It takes no block now; `grow` copies the shared tail for all but the last of its writers.
        `tokens` is dst's own list, equal to that of src as far as src is computed. Raises
        ValueError if src covers tokens that are not committed, or if dst is already running.
        """
        self._require_new(dst)
        source = self._rows[src]
        if source.num_computed != source.num_tokens:
            raise ValueError(f"request {src!r} has uncommitted tokens and cannot be forked")
        self._pool.hold(self._held(source))
        row = self._rows[dst] = replace(source, tokens=tokens, table=source.table.copy())
        return row

    def take_copies(self) -> list[tuple[int, int]]:
        """Hand the block copies (source id, target id) to the step that is about to run.

        They must run before its forward pass. Both ends stay held until `copies_done`.
        """
        return self._copies.take()

    def take_swaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Hand the swaps to that step: out (device id, host id), and in (host id, device id).

        They must run before its copies, those out first: one may be read by one in. Both ends
        stay held until `copies_done`.
        """
        return self.host.swap_outs.take(), self.host.swap_ins.take()

    def copies_done(self) -> None:
        """Let go of the copies and swaps taken so far: they have run. Comes before `commit`."""
        for copies in (self.host.swap_outs, self.host.swap_ins, self._copies):
            copies.done()
        leaving, self._leaving = self._leaving, []
        for row in leaving:
            self._let_go(row)

    def release(self, request_id: Hashable) -> None:
        """End a request in whatever state; does nothing for an id that is not running.

        Its blocks go tail first, so a prefix is evicted from its end. Where blocks are being
        swapped in for it, it keeps them all until `copies_done`.
        """
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._retention.expire()
            self._let_go(row)

    def retain(self, namespace: bytes, tokens: Sequence[int], ttl: float) -> int:
        """Keep a published prefix for `ttl` seconds from now, and anew from every read.

        Softly: its blocks are evicted after all others, and no more are retained than a share of
        the pool, which owners divide fairly, see `Retention`. Returns the number of retained
        tokens: whole published blocks of the device from the first on; a `ttl` of 0 retains none.
        """
        if ttl <= 0:
            return 0
        path, _ = self._store.host.split(self._store.match(namespace, tokens, len(tokens)))
        return self._retention.retain(namespace[:OWNER_BYTES], path, ttl) * self.block_size

    def drop(self, owner: bytes) -> int:
        """Forget all that is published in the namespaces of an owner, or in one namespace.

        Running requests keep their blocks but publish no more: what they compute rests on KV
        from before. Returns how many blocks were forgotten.
        """
        for row in (*self._rows.values(), *self._leaving):
            if row.namespace.startswith(owner):
                row.publish_limit = 0
        return self._store.drop(owner)

    def reset(self) -> int:
        """Drop every namespace, as for new weights; returns how many blocks were forgotten."""
        return self.drop(b"")

    def table(self, request_id: Hashable) -> list[int]:
        """Return the row's live block table, for reading only."""
        return self._rows[request_id].table

    def check(self) -> None:
        """Verify every invariant; raises AssertionError. Walks everything: for idle times."""
        integrity.check(self._store, [*self._rows.values(), *self._leaving], self._copies)

    def _let_go(self, row: Row) -> None:
        if self._swapping(row):
            self._leaving.append(row)
        else:
            held = self._held(row)
            self._residency.used(held)
            self._pool.release(reversed(held))

    def _swapping(self, row: Row) -> bool:
        """Whether KV is still to be swapped in: its last hit is then the target of a copy."""
        if not row.host_tokens:
            return False
        last_hit = row.table[row.hit_tokens // self.block_size - 1]
        return self._pool.blocks[last_hit].copies > 0

    def _require_new(self, request_id: Hashable) -> None:
        if request_id in self._rows:
            raise ValueError(f"request {request_id!r} is already running")

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _blocks_needed(self, num_tokens: int, hits: Sequence[Block]) -> int:
        idle = sum(not block.ref_count for block in hits)
        return self._blocks(num_tokens) - len(hits) + idle

    def _held(self, row: Row) -> list[Block]:
        blocks = self._pool.blocks
        return [blocks[block_id] for block_id in row.table]

    def _shared_tail(self, row: Row) -> Block | None:
        """Return the partly filled last block if other rows have it too."""
        if row.num_tokens % self.block_size == 0:
            return None
        tail = self._pool.blocks[row.table[-1]]
        return tail if tail.ref_count - tail.copies > 1 else None
