"""Random lives of requests, against a naive model of what is published and what is written.

Per physical slot, the model keeps all that a KV entry depends on: namespace, epoch (which every
drop moves) and the tokens up to and including its own. A row in whose computed slots anything
else is found has been given a wrong block. Device and host have slots of their own; what a swap or
a copy will have written by the time of the next step is looked up at its source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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

from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.copies import Copies
from ragcache.prefix.names import namespace_name, owner_name
from ragcache.prefix.rows import Plan

BLOCKS, SIZE = 12, 2
CAP = 5  # retained blocks
MOMENT = 2**-10  # seconds between what sets ends of retentions: no two owners' ends are equal
NAMESPACES = [namespace_name(owner_name(name)) for name in ("one", "two", "three")]

Prefix = tuple[bytes, tuple[int, ...]]

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
class Swaps:
    """Pairs of source and target: those for the next step, and those of the one that runs."""

    waiting: list[tuple[int, int]] = field(default_factory=list)
    running: list[tuple[int, int]] = field(default_factory=list)

    def ends(self, index: int) -> set[int]:
        return {pair[index] for pair in self.waiting + self.running}


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
        self.cache = PrefixCache(
            BLOCKS,
            SIZE,
            retain_share=CAP / BLOCKS,
            clock=lambda: self.now,
            host_blocks=host_blocks,
            min_swap=min_swap,
        )
        self.host_blocks, self.min_swap = host_blocks, min_swap
        self.hosted: dict[Prefix, int] = {}  # -> host block
        self.host_slots: dict[tuple[int, int], object] = {}
        self.swap_outs = Swaps()
        self.swap_ins = Swaps()
        self.leaving: list[list[int]] = []  # tables of the released that are still swapped in for
        self.wanted: set[int] = set()  # host blocks that are being swapped in
        self.epochs = dict.fromkeys(NAMESPACES, 0)
        self.running: dict[int, Request] = {}
        self.slots: dict[tuple[int, int], object] = {}  # (block, offset) -> entry
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
        swapped = self.swap_outs.ends(0) | self.swap_ins.ends(1)
        return copied | swapped | {block for table in tables + self.leaving for block in table}

    def held_on_host(self) -> set[int]:
        return self.swap_outs.ends(1) | self.swap_ins.ends(0) | self.wanted

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
        behind = prefixes[len(on_device) :]
        on_host = list(takewhile(self.hosted.__contains__, behind))
        return on_device, on_host if len(on_host) >= self.min_swap else []

    def kv(self, block: int, offset: int) -> object:
        """What a slot of the device will hold once all that is waiting has run."""
        block = {target: source for source, target in self.waiting_copies}.get(block, block)
        swapped = {target: source for source, target in self.swap_ins.waiting}
        if block in swapped:
            return self.host_kv(swapped[block], offset)
        return self.slots.get((block, offset))

    def host_kv(self, block: int, offset: int) -> object:
        """The same for a slot of the host."""
        swapped = {target: source for source, target in self.swap_outs.waiting}
        if block in swapped:
            return self.slots.get((swapped[block], offset))
        return self.host_slots.get((block, offset))

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
            self.evict(evicted[block], block)
        self.kept = {prefix: kept for prefix, kept in self.kept.items() if prefix in self.published}
        for namespace, prefix in self.published:
            parent = prefix[:-SIZE]
            assert not parent or (namespace, parent) in self.published, "a child outlived it"

    def evict(self, prefix: Prefix, block: int) -> None:
        """A prefix lost its block on the device: it is on the host now, if there is room."""
        free = set(range(self.host_blocks)) - self.held_on_host()
        if not free:
            below = [each for each in self.hosted if self.is_below(each, prefix)]
            for each in below:
                del self.hosted[each]
            return
        source, target = self.new_swaps(self.cache.host.swap_outs, self.swap_outs)[0]
        assert source == block
        assert target in free, "a host block in use was given away"
        for lost in [each for each, hosted in self.hosted.items() if hosted == target]:
            assert not free - set(self.hosted.values()), "there was a free host block"
            del self.hosted[lost]
            assert not any(self.is_below(each, lost) for each in self.hosted), "not a leaf"
        self.swap_outs.waiting.append((source, target))
        self.hosted[prefix] = target

    @staticmethod
    def is_below(one: Prefix, other: Prefix) -> bool:
        return one[0] == other[0] and one != other and one[1][: len(other[1])] == other[1]

    @staticmethod
    def new_swaps(copies: Copies, known: Swaps) -> list[tuple[int, int]]:
        """What the cache has scheduled and the model has not yet seen."""
        pairs = [(source.id, target.id) for source, target in copies.waiting]
        assert pairs[: len(known.waiting)] == known.waiting
        return pairs[len(known.waiting) :]

    def swap_in(self, prefixes: list[Prefix], table: list[int]) -> None:
        """These prefixes of the host come back to these blocks."""
        swaps = [
            (self.hosted.pop(prefix), block) for prefix, block in zip(prefixes, table, strict=True)
        ]
        assert self.new_swaps(self.cache.host.swap_ins, self.swap_ins) == swaps
        self.swap_ins.waiting += swaps
        self.published |= dict(zip(prefixes, table, strict=True))

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
        assert [block.id for block in plan.host_hits] == [self.hosted[each] for each in on_host]
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
        assert row.table[: len(hits)] == hits
        assert len(row.table) == len(hits) + new
        for prefix in self.path(tokens[: row.hit_tokens], plan.namespace):
            if prefix in self.kept:
                until, ttl = self.kept[prefix]
                self.kept[prefix] = max(until, self.now + ttl), ttl
        assert row.hit_tokens == len(on_device + on_host) * SIZE
        assert row.host_tokens == len(on_host) * SIZE
        swapped, lent = row.table[len(hits) :][: len(on_host)], row.table[len(hits + on_host) :]
        self.wanted = {self.hosted[prefix] for prefix in on_host}
        self.take(swapped, held | set(hits))
        self.wanted = set()
        self.swap_in(on_host, swapped)
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

    @precondition(lambda self: self.waiting_copies or self.swap_outs.waiting)
    @rule()
    def copy(self) -> None:
        """The copies of a step run, all at once."""
        swaps = self.cache.take_swaps()
        assert swaps == (self.swap_outs.waiting, self.swap_ins.waiting)
        assert self.cache.take_copies() == self.waiting_copies
        outs, ins = swaps
        for pairs, source_slots, target_slots in (
            (outs, self.slots, self.host_slots),
            (ins, self.host_slots, self.slots),
            (self.waiting_copies, self.slots, self.slots),
        ):
            read = [[source_slots.get((s, offset)) for offset in range(SIZE)] for s, _ in pairs]
            for (_, target), entries in zip(pairs, read, strict=True):
                target_slots.update({(target, i): entry for i, entry in enumerate(entries)})
        for swap in (self.swap_outs, self.swap_ins):
            swap.running += swap.waiting
            swap.waiting = []
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
        self.running_copies, self.swap_outs.running, self.swap_ins.running = [], [], []
        self.leaving = []
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
                self.hosted.pop(prefix, None)
        self.cache.commit(request_id, computed)
        assert self.cache.table(request_id) == expected
        request.computed = computed

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(list(self.running))))

    def release(self, request_id: int) -> None:
        if self.running.pop(request_id).swapped & self.swap_ins.ends(1):
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
        hosted = [prefix for prefix in self.hosted if prefix[0] in dropped]
        count = self.cache.reset() if namespace is None else self.cache.drop(namespace)
        assert count == len(gone) + len(hosted)
        for prefix in hosted:
            del self.hosted[prefix]
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
        for blocks, kv in ((self.published, self.kv), (self.hosted, self.host_kv)):
            for (namespace, prefix), block in blocks.items():
                assert kv(block, SIZE - 1) == (namespace, self.epochs[namespace], prefix)

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
        counts, held = self.cache.host.pool.counts(), self.held_on_host()
        assert counts.held == len(held)
        assert counts.cached == len(set(self.hosted.values()) - held)
        assert counts.total == self.host_blocks

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
