"""Random lives of requests, against a naive model of what is published and what is written.

Per physical slot, the model keeps all that a KV entry depends on: namespace, epoch (which every
drop moves) and the tokens up to and including its own. A row in whose computed slots anything
else is found has been given a wrong block. Device and host have slots of their own; what a swap or
a copy will have written by the time of the next step is looked up at its source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from mirror import Mirror
from naive_host import NaiveHost, Prefix, Slots, run

from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.names import block_names, namespace_name, owner_name
from ragcache.prefix.rows import Plan

BLOCKS, SIZE = 12, 2
CAP = 5  # retained blocks
MOMENT = 2**-10  # seconds between what sets ends of retentions: no two owners' ends are equal
NAMESPACES = [namespace_name(owner_name(name)) for name in ("one", "two", "three")]

namespaces = st.sampled_from([NAMESPACES[0], NAMESPACES[0], *NAMESPACES])
bits = st.integers(0, 1)
limits = st.sampled_from([None, None, 0, 3, 4])
prompts = st.builds(
    lambda bit, length, tail: [bit] * length + tail,
    bits,
    st.sampled_from([4, 5, 6, 7, 8, 0]),
    st.lists(bits, max_size=2),
)


@dataclass
class Request:
    """One running request as the model sees it; it covers all of its tokens."""

    namespace: bytes
    epoch: int
    tokens: list[int]
    computed: int
    publish_limit: int
    swapped: set[int]  # blocks that were swapped in for it

    def entry(self, position: int) -> tuple[bytes, int, tuple[int, ...]]:
        return self.namespace, self.epoch, tuple(self.tokens[: position + 1])


class Lives(RuleBasedStateMachine):
    @initialize(
        host_blocks=st.sampled_from([0, 3, 8, 40]),
        min_swap=st.sampled_from([1, 2]),
    )
    def begin(self, host_blocks: int, min_swap: int) -> None:
        self.now = 0.0
        self.mirror = Mirror()
        self.cache = PrefixCache(
            BLOCKS,
            SIZE,
            retain_share=CAP / BLOCKS,
            clock=lambda: self.now,
            host_blocks=host_blocks,
            min_swap=min_swap,
            sink=self.mirror,
        )
        self.host = NaiveHost(self.cache.host, host_blocks, min_swap)
        self.leaving: list[list[int]] = []  # tables of the released that are still swapped in for
        self.epochs = dict.fromkeys(NAMESPACES, 0)
        self.running: dict[int, Request] = {}
        self.slots: Slots = {}
        self.published: dict[Prefix, int] = {}  # -> block
        self.kept: dict[Prefix, tuple[float, float]] = {}  # -> until, ttl
        self.waiting_copies: list[tuple[int, int]] = []
        self.running_copies: list[tuple[int, int]] = []
        self.plans: list[Plan] = []
        self.last_id = 0

    # What the model knows

    def held(self) -> set[int]:
        tables = [self.cache.table(request_id) for request_id in self.running]
        copied = {block for pair in [*self.waiting_copies, *self.running_copies] for block in pair}
        swapped = self.host.swap_outs.ends(0) | self.host.swap_ins.ends(1)
        return copied | swapped | {block for table in tables + self.leaving for block in table}

    def path(self, tokens: Sequence[int], namespace: bytes) -> list[Prefix]:
        """The published prefixes of whole blocks on the device."""
        prefixes = [(namespace, tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]
        return list(takewhile(self.published.__contains__, prefixes))

    def hits(
        self, tokens: Sequence[int], namespace: bytes, limit: int | None
    ) -> tuple[list[Prefix], list[Prefix]]:
        """Those of a prompt on the device, and those behind them on the host."""
        stop = max(len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1), 0)
        prefixes = [(namespace, tuple(tokens[:end])) for end in range(SIZE, stop + 1, SIZE)]
        on_device = list(takewhile(self.published.__contains__, prefixes))
        return on_device, self.host.hits(prefixes[len(on_device) :])

    def kv(self, block: int, offset: int) -> object:
        """What a slot of the device will hold once all that is waiting has run."""
        block = {target: source for source, target in self.waiting_copies}.get(block, block)
        swapped = {target: source for source, target in self.host.swap_ins.waiting}
        if block in swapped:
            return self.host.kv(swapped[block], offset, self.slots)
        return self.slots.get((block, offset))

    def expire(self) -> None:
        self.kept = {prefix: kept for prefix, kept in self.kept.items() if kept[0] > self.now}

    def take(self, blocks: list[int], held: set[int]) -> None:
        """These blocks were lent while `held` were not to be touched: the model forgets them."""
        assert len(set(blocks)) == len(blocks)
        assert not held & set(blocks), "a held block was lent"
        kept = {self.published[prefix] for prefix in self.kept}
        if kept & set(blocks):
            assert not set(range(BLOCKS)) - held - kept - set(blocks), "a retained block came first"
        evicted = {block: prefix for prefix, block in self.published.items() if block in blocks}
        self.published = {k: block for k, block in self.published.items() if block not in blocks}
        for block in filter(evicted.__contains__, blocks):  # in the order in which they were lent
            self.host.evict(evicted[block], block)
        self.kept = {prefix: kept for prefix, kept in self.kept.items() if prefix in self.published}
        for namespace, prefix in self.published:
            parent = prefix[:-SIZE]
            assert not parent or (namespace, parent) in self.published, "a child outlived it"

    def new_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def idle(self) -> list[int]:
        """The requests that have no token left to compute."""
        return [i for i, each in self.running.items() if each.computed == len(each.tokens)]

    # What can happen

    @precondition(lambda self: len(self.running) < 4)
    @rule(tokens=prompts, namespace=namespaces, limit=limits, waits=st.booleans())
    def arrive(self, tokens: list[int], namespace: bytes, limit: int | None, waits: bool) -> None:
        plan = self.cache.plan(tokens, namespace, limit)
        on_device, on_host = self.hits(tokens, namespace, limit)
        assert [block.id for block in plan.hits] == [self.published[each] for each in on_device]
        assert [block.id for block in plan.host_hits] == [
            self.host.published[each] for each in on_host
        ]
        assert plan.hit_tokens == len(on_device + on_host) * SIZE
        assert plan.host_tokens == len(on_host) * SIZE
        if waits:
            self.plans.append(plan)
        else:
            self.admit(plan, None)

    @precondition(lambda self: self.plans and len(self.running) < 4)
    @rule(publish_limit=limits)
    def admit_waiting(self, publish_limit: int | None) -> None:
        self.admit(self.plans.pop(0), publish_limit)

    def admit(self, plan: Plan, publish_limit: int | None) -> None:
        self.now += MOMENT
        tokens, held = plan.tokens, self.held()
        on_device, on_host = self.hits(tokens, plan.namespace, plan.limit)
        hits = [self.published[prefix] for prefix in on_device]
        new = -(-len(tokens) // SIZE) - len(hits)
        request_id = self.new_id()
        row = self.cache.admit(request_id, plan, publish_limit)
        self.expire()
        fits = new + len(set(hits) - held) <= BLOCKS - len(held)
        assert (row is not None) == fits
        if row is None:
            return
        if request_id % 4:  # the others would be resuming
            self.cache.count_hit(request_id)
        assert row.table[: len(hits)] == hits
        assert len(row.table) == len(hits) + new
        for prefix in self.path(tokens[: row.hit_tokens], plan.namespace):
            if prefix in self.kept:
                until, ttl = self.kept[prefix]
                self.kept[prefix] = max(until, self.now + ttl), ttl
        assert row.hit_tokens == len(on_device + on_host) * SIZE
        assert row.host_tokens == len(on_host) * SIZE
        swapped, lent = row.table[len(hits) :][: len(on_host)], row.table[len(hits + on_host) :]
        self.host.wanted = {self.host.published[prefix] for prefix in on_host}
        self.take(swapped, held | set(hits))
        self.host.wanted = set()
        self.host.swap_in(on_host, swapped)
        self.published |= dict(zip(on_host, swapped, strict=True))
        self.take(lent, held | set(hits) | set(swapped))
        epoch = self.epochs[plan.namespace]
        publish_limit = 99 if publish_limit is None else publish_limit
        self.running[request_id] = Request(
            plan.namespace, epoch, tokens, row.hit_tokens, publish_limit, set(swapped)
        )

    @precondition(lambda self: self.idle())
    @rule(new_tokens=st.lists(bits, min_size=1, max_size=3))
    def decode(self, new_tokens: list[int]) -> None:
        """Every idle request that has room gets these tokens."""
        for request_id in self.idle():
            self.grow(request_id, new_tokens)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), new_tokens=st.lists(bits, min_size=1, max_size=3))
    def decode_one(self, data: st.DataObject, new_tokens: list[int]) -> None:
        self.grow(data.draw(st.sampled_from(self.idle())), new_tokens)

    def grow(self, request_id: int, new_tokens: list[int]) -> None:
        tokens = self.running[request_id].tokens
        table, held = self.cache.table(request_id).copy(), self.held()
        shared = len(tokens) % SIZE > 0 and any(
            table[-1] in self.cache.table(other) for other in self.running if other != request_id
        )
        new = -(-(len(tokens) + len(new_tokens)) // SIZE) - len(table)
        grown = self.cache.grow(request_id, len(tokens) + len(new_tokens))
        self.expire()
        assert grown == (new + shared <= BLOCKS - len(held))
        if not grown:
            assert self.cache.table(request_id) == table
            self.release(request_id)  # as a preemption would
            return
        tokens += new_tokens
        kept = len(table) - shared
        after = self.cache.table(request_id)
        assert after[:kept] == table[:kept]
        assert len(after) == len(table) + new
        self.take(after[kept:], held)
        if shared:
            self.waiting_copies.append((table[-1], after[kept]))

    @precondition(lambda self: self.idle() and len(self.running) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        src, dst = data.draw(st.sampled_from(self.idle())), self.new_id()
        source = self.running[src]
        tokens = source.tokens.copy()
        assert self.cache.fork(src, dst, tokens).table == self.cache.table(src)
        self.running[dst] = replace(source, tokens=tokens)

    @precondition(lambda self: self.waiting_copies or self.host.swap_outs.waiting)
    @rule()
    def copy(self) -> None:
        """The swaps of a step run, then its copies, each of these kinds all at once."""
        outs, ins = self.host.swap_outs.waiting, self.host.swap_ins.waiting
        assert self.cache.take_swaps() == (outs, ins)
        assert self.cache.take_copies() == self.waiting_copies
        self.host.run(self.slots, SIZE)
        run(self.waiting_copies, self.slots, self.slots, SIZE)
        self.running_copies += self.waiting_copies
        self.waiting_copies = []

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Every request computes a chunk, if only an empty one; then they commit in any order."""
        longest_chunk = data.draw(st.sampled_from([1, 3, 99]))
        self.compute(data.draw(st.permutations(list(self.running))), longest_chunk)

    @precondition(lambda self: len(self.running) < 4)
    @rule(served=st.lists(st.tuples(prompts, namespaces), min_size=1, max_size=4))
    def serve(self, served: list[tuple[list[int], bytes]]) -> None:
        """Prompts that come, are computed at once, and go, one after the other."""
        for tokens, namespace in served:
            self.arrive(tokens, namespace, None, waits=False)
            if self.last_id in self.running:
                self.compute([self.last_id], 99)
                self.release(self.last_id)

    def compute(self, order: list[int], longest_chunk: int) -> None:
        self.copy()
        computed = {}
        for request_id in order:
            request, table = self.running[request_id], self.cache.table(request_id)
            stop = min(request.computed + longest_chunk, len(request.tokens))
            for position in range(request.computed, stop):
                slot = table[position // SIZE], position % SIZE
                self.slots[slot] = request.entry(position)
            computed[request_id] = stop
        self.cache.copies_done()
        self.host.ran()
        self.running_copies, self.leaving = [], []
        for request_id in order:
            self.commit(request_id, computed[request_id])

    def commit(self, request_id: int, computed: int) -> None:
        request = self.running[request_id]
        expected = self.cache.table(request_id).copy()
        if request.epoch == self.epochs[request.namespace]:
            stop = min(computed, request.publish_limit) // SIZE
            for i in range(request.computed // SIZE, stop):
                prefix = request.namespace, tuple(request.tokens[: (i + 1) * SIZE])
                expected[i] = self.published.setdefault(prefix, expected[i])
                self.host.published.pop(prefix, None)
        self.cache.commit(request_id, computed)
        assert self.cache.table(request_id) == expected
        request.computed = computed

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(list(self.running))))

    def release(self, request_id: int) -> None:
        if self.running.pop(request_id).swapped & self.host.swap_ins.ends(1):
            self.leaving.append(self.cache.table(request_id))
        self.cache.release(request_id)
        self.cache.release(request_id)
        self.expire()

    @rule(seconds=st.sampled_from([1, 5, 20]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.published)
    @rule(data=st.data(), ttl=st.sampled_from([5, 20]))
    def retain(self, data: st.DataObject, ttl: int) -> None:
        """Block by block, one gives way; where there is none, the path is cut."""
        self.now += MOMENT
        namespace, tokens = data.draw(st.sampled_from(sorted(self.published)))
        until, path = self.now + ttl, self.path(tokens, namespace)
        retained = self.cache.retain(namespace, list(tokens), ttl) // SIZE
        self.expire()
        others = {prefix: kept for prefix, kept in self.kept.items() if prefix not in path}
        known = sum(prefix in self.kept for prefix in path)
        held = Counter(prefix[0] for prefix in self.kept)
        ending = sorted((kept[0], prefix[0]) for prefix, kept in others.items())
        lost = []
        for fitting in range(known, len(path)):
            if sum(held.values()) == CAP:
                victim = self.victim(namespace, until, held, ending)
                if victim is None:
                    break
                ending.remove(victim)
                lost.append(victim)
                held[victim[1]] -= 1
            held[namespace] += 1
            known = fitting + 1
        assert retained == known
        actual = self.retained()
        gone = [prefix for prefix in others if self.published[prefix] not in actual]
        assert sorted((others[prefix][0], prefix[0]) for prefix in gone) == sorted(lost)
        for prefix in gone:
            del self.kept[prefix]
        for prefix in path[:retained]:
            before = self.kept.get(prefix, (0.0, 0.0))
            self.kept[prefix] = max(before[0], until), max(before[1], ttl)

    def victim(
        self,
        namespace: bytes,
        until: float,
        held: Counter[bytes],
        ending: list[tuple[float, bytes]],
    ) -> tuple[float, bytes] | None:
        """What gives way to one more block: of owners above their share, else one's own."""
        owners = len({*held, namespace})
        if (held[namespace] + 1) * owners <= CAP:
            return next(each for each in ending if held[each[1]] * owners > CAP)
        own = (each for each in ending if each[1] == namespace and each[0] < until)
        return next(own, None)

    def retained(self) -> dict[int, tuple[float, float]]:
        blocks = self.cache._store.pool.blocks
        return {block.id: (block.keep_until, block.keep_ttl) for block in blocks if block.keep_ttl}

    @precondition(lambda self: len(self.published) > 6)
    @rule(namespace=st.sampled_from([*NAMESPACES, None]))
    def drop(self, namespace: bytes | None) -> None:
        dropped = NAMESPACES if namespace is None else [namespace]
        gone = [prefix for prefix in self.published if prefix[0] in dropped]
        hosted = [prefix for prefix in self.host.published if prefix[0] in dropped]
        count = self.cache.reset() if namespace is None else self.cache.drop(namespace)
        assert count == len(gone) + len(hosted)
        for prefix in hosted:
            del self.host.published[prefix]
        for prefix in gone:
            del self.published[prefix]
            self.kept.pop(prefix, None)
        for each in dropped:
            self.epochs[each] += 1

    # What must hold after each of them

    @invariant()
    def every_invariant_of_its_own_holds(self) -> None:
        self.cache.check()

    @invariant()
    def every_computed_slot_holds_what_its_row_computed(self) -> None:
        for request_id, request in self.running.items():
            table = self.cache.table(request_id)
            for position in range(request.computed):
                entry = self.kv(table[position // SIZE], position % SIZE)
                assert entry == request.entry(position)

    @invariant()
    def every_published_block_holds_its_prefix(self) -> None:
        for (namespace, prefix), block in self.published.items():
            assert self.kv(block, SIZE - 1) == (namespace, self.epochs[namespace], prefix)
        for (namespace, prefix), block in self.host.published.items():
            last = self.host.kv(block, SIZE - 1, self.slots)
            assert last == (namespace, self.epochs[namespace], prefix)

    @invariant()
    def retained_blocks_are_those_of_the_model(self) -> None:
        assert self.retained() == {self.published[p]: kept for p, kept in self.kept.items()}
        assert self.cache.retained == len(self.kept)

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        counts, held = self.cache.counts(), self.held()
        assert counts.held == len(held)
        assert counts.cached == len(set(self.published.values()) - held)
        assert counts.total == BLOCKS
        counts, held = self.cache.host.pool.counts(), self.host.held()
        assert counts.held == len(held)
        assert counts.cached == len(set(self.host.published.values()) - held)
        assert counts.total == self.host.num_blocks

    @invariant()
    def what_is_told_is_what_can_be_found(self) -> None:
        places = dict.fromkeys(self.published, False) | dict.fromkeys(self.host.published, True)
        assert self.mirror.on_host == {
            block_names(namespace, tokens, SIZE)[-1]: on_host
            for (namespace, tokens), on_host in places.items()
        }

    def teardown(self) -> None:
        for request_id in self.running:
            self.cache.release(request_id)
        self.cache.take_copies()
        self.cache.take_swaps()
        self.cache.copies_done()
        self.cache.check()
        assert self.cache.counts().held == self.cache.host.pool.counts().held == 0


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
