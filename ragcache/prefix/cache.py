"""The prefix cache: which request holds which blocks, and which prefixes can be found.

It moves block ids only; the K and V themselves, and the copies it asks for, are the engine's.
The life of a request: `plan` → `admit` → (`grow` → `take_copies` → one step → `copies_done` →
`commit`)* → `release`. Not thread-safe: the engine thread owns it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ragcache.prefix import integrity
from ragcache.prefix.blocks import Block, BlockPool, Node
from ragcache.prefix.names import block_keys, block_name
from ragcache.prefix.radix import RadixIndex
from ragcache.prefix.rows import Plan, Row
from ragcache.types import PoolCounts


class PrefixCache:
    """Shares KV blocks between requests whose prompts begin alike, within a namespace.

    Token lists are kept by reference and may only be appended to while in use. With `share` off
    nothing is ever published, hence nothing found: the control for every measurement.
    """

    def __init__(self, num_blocks: int, block_size: int, *, share: bool = True) -> None:
        self.block_size = block_size
        self.evictions = 0  # cached blocks forgotten to make room, ever
        self.share = share
        self._pool = BlockPool(num_blocks)
        self._index = RadixIndex()
        self._rows: dict[Hashable, Row] = {}
        self._copies: list[tuple[Block, Block]] = []  # source, target; wait for the next step
        self._copying: list[tuple[Block, Block]] = []  # handed to a step

    @property
    def generation(self) -> int:
        """Moves when a block is published, evicted or dropped: older plans may have aged."""
        return self._index.generation

    @property
    def available(self) -> int:
        """Blocks that a plan or a row can take now: free + cached."""
        return self._pool.available

    def counts(self) -> PoolCounts:
        """Count the blocks by state."""
        pool = self._pool
        return PoolCounts(pool.free, pool.cached, held=len(pool.blocks) - pool.available)

    def plan(self, tokens: Sequence[int], namespace: bytes) -> Plan:
        """Match the longest published prefix of whole blocks; changes nothing.

        At least one token is left to compute, so that there are logits to sample from.
        `namespace` is a `namespace_name`.
        """
        stop = max(len(tokens) - 1, 0) // self.block_size
        hits = self._index.match(namespace, block_keys(tokens, 0, stop, self.block_size))
        return Plan(
            tokens,
            namespace,
            hits,
            hit_tokens=len(hits) * self.block_size,
            blocks_needed=self._blocks_needed(len(tokens), hits),
            generation=self.generation,
        )

    def admit(self, request_id: Hashable, plan: Plan) -> Row | None:
        """Hold the hits and take the other blocks for all of `plan.tokens`, or change nothing.

        A plan that has aged is made again, so `Row.hit_tokens` is what counts. Returns None where
        too few blocks are available; raises ValueError for an id that is already running.
        """
        self._require_new(request_id)
        if plan.generation != self.generation:
            plan = self.plan(plan.tokens, plan.namespace)
        num_tokens = len(plan.tokens)
        if self._blocks_needed(num_tokens, plan.hits) > self._pool.available:
            return None
        self._pool.hold(plan.hits)
        table = [block.id for block in plan.hits]
        table += self._take(self._blocks(num_tokens) - len(table))
        row = Row(
            plan.tokens,
            plan.namespace,
            table,
            hit_tokens=plan.hit_tokens,
            num_tokens=num_tokens,
            num_computed=plan.hit_tokens,
            publishes=self.share,
        )
        self._rows[request_id] = row
        return row

    def grow(self, request_id: Hashable, num_tokens: int) -> bool:
        """Make the row cover `num_tokens` tokens in all; False, and no change, without room.

        The new tokens are about to be written. Where the first of them would land in a block that
        another row shares (after `fork`), this row gets a copy of it, see `take_copies`.
        """
        row = self._rows[request_id]
        if num_tokens <= row.num_tokens:
            return True
        shared = self._shared_tail(row)
        new = self._blocks(num_tokens) - len(row.table)
        if new + (shared is not None) > self._pool.available:
            return False
        if shared is not None:
            self._copy_tail(row, shared)
        row.table += self._take(new)
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
        if row.publishes:
            self._publish(row, num_computed // self.block_size)
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
        taken, self._copies = self._copies, []
        self._copying += taken
        return [(source.id, target.id) for source, target in taken]

    def copies_done(self) -> None:
        """Let go of the copies taken so far: they have run. Comes before that step's `commit`."""
        done, self._copying = self._copying, []
        for pair in done:
            for block in pair:
                block.copies -= 1
            self._pool.release(pair)

    def release(self, request_id: Hashable) -> None:
        """End a request in whatever state; does nothing for an id that is not running.

        Its blocks go tail first, so a prefix is evicted from its end.
        """
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._pool.release(reversed(self._held(row)))

    def drop(self, namespace: bytes) -> int:
        """Forget all that is published in a namespace; returns how many blocks that were.

        Running requests keep their blocks but publish no more: what they compute rests on KV
        from before.
        """
        forgotten = self._index.drop(namespace)
        idle = [block for block in forgotten if not block.ref_count]
        self._pool.hold(idle)
        self._pool.release(idle)  # through the queue again: now to its front
        for row in self._rows.values():
            if row.namespace == namespace:
                row.publishes = False
        return len(forgotten)

    def reset(self) -> int:
        """Drop every namespace, as for new weights; returns how many blocks were forgotten."""
        running = {row.namespace for row in self._rows.values()}
        return sum(self.drop(namespace) for namespace in running.union(self._index.roots))

    def table(self, request_id: Hashable) -> list[int]:
        """Return the row's live block table, for reading only."""
        return self._rows[request_id].table

    def names(self, request_id: Hashable) -> list[bytes]:
        """Name the row's published blocks, first to last."""
        row = self._rows[request_id]
        names: list[bytes] = []
        if row.publishes:
            name = row.namespace
            for block in self._held(row)[: row.num_computed // self.block_size]:
                name = block.name = block.name or block_name(name, block.key)
                names.append(name)
        return names

    def check(self) -> None:
        """Verify every invariant; raises AssertionError. Walks everything: for idle times."""
        copies = self._copies + self._copying
        integrity.check(self._pool, self._index, list(self._rows.values()), copies, self.block_size)

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

    def _take(self, count: int) -> list[int]:
        taken = self._pool.take(count)
        for block in taken:
            if block.parent is not None:
                self._index.remove(block)
                self.evictions += 1
        return [block.id for block in taken]

    def _shared_tail(self, row: Row) -> Block | None:
        """Return the partly filled last block if other rows have it too."""
        if row.num_tokens % self.block_size == 0:
            return None
        tail = self._pool.blocks[row.table[-1]]
        return tail if tail.ref_count - tail.copies > 1 else None

    def _copy_tail(self, row: Row, source: Block) -> None:
        """Schedule a copy of the row's last block; the row's reference to it becomes the copy's."""
        (target_id,) = self._take(1)
        target = self._pool.blocks[target_id]
        self._pool.hold([target])
        source.copies += 1
        target.copies += 1
        row.table[-1] = target_id
        self._copies.append((source, target))

    def _publish(self, row: Row, stop: int) -> None:
        """Publish logical blocks up to `stop`, going on from those that are."""
        first = row.num_computed // self.block_size
        if first == stop:
            return
        blocks, table = self._pool.blocks, row.table
        parent: Node = blocks[table[first - 1]] if first else self._index.root(row.namespace)
        keys = block_keys(row.tokens, first, stop, self.block_size)
        for i, key in enumerate(keys, first):
            ours = blocks[table[i]]
            if ours.copies:
                raise RuntimeError(f"block {ours.id} is committed while it is being copied")
            published = parent.children.get(key)
            if published is None:
                self._index.insert(parent, key, ours)
                published = ours
            elif published is not ours:  # computed twice: the row goes over, ours is free
                self._pool.hold([published])
                table[i] = published.id
                self._pool.release([ours])
            parent = published
