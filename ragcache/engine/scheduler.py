"""Which tokens run in the next step.

There are no prefill and decode phases: every running sequence has `num_computed` chasing
`len(tokens)`, and a step hands out a token budget (iteration-level batching: Orca, OSDI 2022;
chunked prefill: Sarathi-Serve, OSDI 2024).

Trade-offs of the policy:

- Decodes go first, one token each, so a long prefill cannot starve running streams. The few
  tokens that a grammar may have forced behind the last sampled one go with them if they fit.
- Beside decodes, chunks get no more tokens than fit into the time that a step may take, where
  such a bound is set, so a long prefill does not slow running streams down either.
- The rest of the budget goes to the prefills with the fewest tokens left, which keeps the mean
  time to first token low; the oldest prefill always gets a quarter, so it cannot starve.
- A waiting sequence is admitted only when it would get tokens in this step: admitting earlier
  would hold blocks that stay empty.
- A sequence whose prompt shares uncached leading blocks with a running prefill is held back
  until these are published: a burst of N agents pays for one prefill of the common prefix.
- When blocks run out, the sequence admitted last is preempted: its blocks are released and it
  waits at the front of the queue. What it computed usually is still cached when it resumes.
- While few sequences decode, each also runs a draft of what it may say next, if its own context
  suggests one: weights, and its own keys, are read once for all its rows.
- A sequence that ends behind forced tokens runs them in one more step where that publishes a
  block, because the conversation's next turn begins with them. It has what is left: it preempts
  nobody, gives its blocks back first, and without room it ends at once.
"""

from __future__ import annotations

from collections import deque

from ragcache.engine.drafter import Drafter
from ragcache.engine.request import Chunk, Sequence, total
from ragcache.engine.step_cost import MIN_CHUNK, StepCost
from ragcache.prefix.cache import PrefixCache
from ragcache.prefix.names import shared_blocks
from ragcache.prefix.rows import Plan, Row

LOOKAHEAD = 16  # waiting sequences that one step plans; those held back do not count
SHORT_RUN = 16  # forced tokens that still go with the decodes
MAX_LOGITS = 256  # rows of one chunk; a row of logits is far larger than one of hidden states


class Scheduler:
    """Queues, budget and preemption over one prefix cache.

    `cost` bounds the time of steps with decodes; whoever runs the steps tells it how long they
    take. None: there is no bound. At most `max_draft` tokens are tried ahead for a sequence.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_batch_tokens: int,
        max_running: int,
        cost: StepCost | None = None,
        max_draft: int = 0,
    ) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.cost = cost
        self._drafter = Drafter(cache, max_draft)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.closing: list[Sequence] = []  # ended; the next step computes their last whole blocks
        self.admitted: list[tuple[Sequence, Row]] = []  # since last taken
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to schedule."""
        return bool(self.running or self.closing or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def fork(self, source: Sequence, sequence: Sequence) -> None:
        """Let `sequence` go on from what `source` has computed.

        Without room for another running sequence it queues at the front instead and finds the
        common blocks in the cache.
        """
        if len(self.running) >= self.max_running:
            self.waiting.appendleft(sequence)
            return
        self.cache.fork(source.row, sequence.row, sequence.tokens)
        sequence.num_computed = source.num_computed
        self.running.append(sequence)

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence whose tokens are complete, maybe after one more step."""
        # The last token of an answer never has KV; only forced ones leave more to compute.
        forced = sequence.remaining > 1 and sequence in self.running
        if forced and self.cache.share and self._whole(sequence) > sequence.num_computed:
            self.running.remove(sequence)
            self.closing.append(sequence)
        else:
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence in whatever state it is; removing it again does nothing."""
        for sequences in (self.running, self.closing, self.waiting):
            if sequence in sequences:
                sequences.remove(sequence)
        self.cache.release(sequence.row)

    def take_admitted(self) -> list[tuple[Sequence, Row]]:
        """Sequences admitted since the last call, each with its row."""
        admitted, self.admitted = self.admitted, []
        return admitted

    def schedule(self) -> list[Chunk]:
        """Choose the next step; empty when nothing can run."""
        decodes = self._decodes()
        closing = self._last_chunks(self._budget(decodes, [])) if self.closing else []
        if self.waiting:
            self._admit(self._budget(decodes, closing))
        served = {chunk.sequence for chunk in decodes}
        pending = [sequence for sequence in self.running if sequence not in served]
        prefills = closing
        if pending:
            prefills = closing + self._prefills(pending, self._budget(decodes, closing))
        chunks = decodes + prefills
        if self.cost is not None and chunks:
            self.cost.begin(decodes, prefills)
        return chunks

    def _budget(self, decodes: list[Chunk], closing: list[Chunk]) -> int:
        """Tokens that chunks of prompts may have in the step, beside these."""
        taken = total(closing)
        room = self.max_batch_tokens - total(decodes) - taken
        if self.cost is None or not decodes:
            return room
        # A chunk at the end of a long prompt takes longer: it is not known yet who will get one.
        context = max((each.num_computed for each in self._prefilling()), default=0)
        return min(room, max(self.cost.fitting(decodes, context) - taken, MIN_CHUNK))

    def _decodes(self) -> list[Chunk]:
        sequences = self._grown()
        spare = self.max_batch_tokens - len(sequences)
        chunks: list[Chunk] = []
        for sequence in sequences:
            extra = min(sequence.remaining - 1, spare)
            spare -= extra
            chunks.append(Chunk(sequence, sequence.num_computed, 1 + extra))
        # Prompts come first to the other half.
        return self._drafter.extend(chunks, spare // 2, len(self.running))

    def _grown(self) -> list[Sequence]:
        """The decoding sequences, after making room for the new tokens of all that run."""
        decoding: list[Sequence] = []
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if self._grow(sequence) and self._decoding(sequence):
                decoding.append(sequence)
            position += 1
        return decoding

    @staticmethod
    def _decoding(sequence: Sequence) -> bool:
        return sequence.remaining == 1 or (
            sequence.num_output > 0 and sequence.remaining <= SHORT_RUN
        )

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for all tokens, preempting later sequences; False when itself is."""
        while not self.cache.grow(sequence.row, len(sequence.tokens)):
            if self.closing:
                self.remove(self.closing[-1])
            elif self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> Sequence:
        victim = self.running.pop()
        self.cache.release(victim.row)
        victim.num_computed = 0
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return victim

    def _last_chunks(self, budget: int) -> list[Chunk]:
        """Chunks that complete the last whole blocks of the closing sequences that have room."""
        chunks: list[Chunk] = []
        for sequence in self.closing.copy():
            whole = self._whole(sequence)
            count = whole - sequence.num_computed
            if count <= budget and self.cache.grow(sequence.row, whole):
                chunks.append(Chunk(sequence, sequence.num_computed, count))
                budget -= count
            else:
                self.remove(sequence)
        return chunks

    def _whole(self, sequence: Sequence) -> int:
        """Leading tokens that fill whole blocks which may be published."""
        return sequence.publishable // self.cache.block_size * self.cache.block_size

    def _prefilling(self) -> list[Sequence]:
        return [sequence for sequence in self.running if not self._decoding(sequence)]

    def _prefills(self, pending: list[Sequence], budget: int) -> list[Chunk]:
        if not pending or budget <= 0:
            return []
        counts = {pending[0]: min(self._longest(pending[0]), self._reserve(budget))}
        budget -= counts[pending[0]]
        for sequence in sorted(pending, key=lambda each: each.remaining):
            granted = counts.get(sequence, 0)
            extra = min(self._longest(sequence) - granted, budget)
            counts[sequence] = granted + extra
            budget -= extra
        return [Chunk(each, each.num_computed, count) for each, count in counts.items() if count]

    @staticmethod
    def _longest(sequence: Sequence) -> int:
        """Tokens of the longest chunk that `sequence` may get."""
        limit = MAX_LOGITS if sequence.request.lacks_prompt_logprobs else sequence.remaining
        return min(sequence.remaining, limit)

    @staticmethod
    def _reserve(budget: int) -> int:
        return max(1, budget // 4)

    def _admit(self, budget: int) -> None:
        planned = 0
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_running or planned == LOOKAHEAD:
                return
            if self._held_back(sequence):
                continue
            planned += 1
            plan = self._plan(sequence)
            if not self._has_budget(len(sequence.tokens) - plan.hit_tokens, budget):
                continue
            if not self._start(sequence, plan):
                return  # first come, first served: nobody overtakes by needing fewer blocks

    def _plan(self, sequence: Sequence) -> Plan:
        if sequence.plan is None or sequence.plan.generation != self.cache.generation:
            sequence.plan = self.cache.plan(
                sequence.tokens, sequence.request.namespace, sequence.readable
            )
        return sequence.plan

    def _held_back(self, sequence: Sequence) -> bool:
        """Whether what runs is about to publish blocks that `sequence` can use."""
        if not self.cache.share:
            return False
        size = self.cache.block_size
        readable = sequence.readable // size
        return any(
            min(self._shared(sequence, leader), readable, leader.publishable // size) * size
            > leader.num_computed
            for leader in (*self._prefilling(), *self.closing)
            if leader.request.namespace == sequence.request.namespace
        )

    def _shared(self, sequence: Sequence, leader: Sequence) -> int:
        if leader.row not in sequence.shared:
            sequence.shared[leader.row] = shared_blocks(
                sequence.tokens, leader.tokens, self.cache.block_size
            )
        return sequence.shared[leader.row]

    def _has_budget(self, needed: int, budget: int) -> bool:
        """Whether a newcomer with `needed` tokens to compute would get some in this step."""
        pending = self._prefilling()
        if len(pending) < 2:
            return True
        shorter = sum(each.remaining for each in pending if each.remaining <= needed)
        return shorter + self._reserve(budget) < budget

    def _start(self, sequence: Sequence, plan: Plan) -> bool:
        # One spare block for each running sequence, or the newcomer is preempted at once.
        if plan.blocks_needed + len(self.running) > self.cache.available and self.running:
            return False
        row = self.cache.admit(sequence.row, plan, sequence.request.cacheable)
        if row is None:
            return False
        self.waiting.remove(sequence)
        sequence.num_computed = row.hit_tokens
        sequence.plan = None
        sequence.shared.clear()
        self.running.append(sequence)
        self.admitted.append((sequence, row))
        return True
