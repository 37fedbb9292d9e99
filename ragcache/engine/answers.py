"""From a step's logits to the events that requests are told."""

from __future__ import annotations

from torch import Tensor

from ragcache.engine.logprobs import prompt_logprobs
from ragcache.engine.parts import Part, parts_of
from ragcache.engine.request import Chunk, Request, Sequence
from ragcache.engine.sampler import Sampled, sample
from ragcache.engine.scheduler import Scheduler
from ragcache.errors import GenerationFailed
from ragcache.prefix.rows import Row
from ragcache.types import (
    Admitted,
    EngineEvent,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    Token,
)

Events = list[tuple[str, EngineEvent]]


class Answers:
    """The requests under way: it lets their choices grow and end, and collects their events."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._requests: dict[str, Request] = {}
        self._events: Events = []
        self.query_tokens = self.hit_tokens = self.host_hit_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0

    def take_events(self) -> Events:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def add(self, request: Request) -> None:
        """Queue the first choice of a request; the others branch off when its prompt is done."""
        self._requests[request.id] = request
        self._scheduler.add(Sequence(request, 0))

    def abort(self, request_id: str) -> None:
        """End every choice of a request that still runs; unknown ids are fine."""
        request = self._requests.get(request_id)
        if request is None:
            return
        unborn = [] if request.branched else range(1, request.sampling.n)
        self._events += [(request_id, Finished(i, FinishReason.ABORT, 0)) for i in unborn]
        for sequence in list(request.sequences):
            self._cut(sequence, FinishReason.ABORT)

    def finish(self, request_id: str, index: int) -> None:
        """End one choice because its text is complete."""
        request = self._requests.get(request_id)
        for sequence in list(request.sequences) if request else []:
            if sequence.index == index:
                self._cut(sequence, FinishReason.STOP)

    def announce(self, sequence: Sequence, row: Row) -> None:
        """Tell and count a request's hit once; coming back after preemption is not news."""
        if sequence.request.admitted:
            return
        sequence.request.admitted = True
        self.query_tokens += sequence.prompt_len
        self.hit_tokens += row.hit_tokens
        self.host_hit_tokens += row.host_tokens
        self._cache.count_hit(sequence.row)
        self._events.append((sequence.request.id, Admitted(row.hit_tokens)))

    def extend(self, chunks: list[Chunk], logits: Tensor) -> None:
        """Go on from the chunks of a step, committed by now, and their rows of `logits`."""
        parts = parts_of(chunks)
        if not parts:
            return
        # A GPU may still be at work. Nothing may wait for it before `sample` does, which has the
        # masks of the grammars filled first; so what forks and is forced is worked out here.
        for part in parts:
            self._open(part)
        sampling = [each for part in parts for each in part.rows()]
        rows, sequences = [row for row, _ in sampling], [sequence for _, sequence in sampling]
        sampled, broken = sample(logits, sequences, rows)
        tokens = iter(sampled)
        for part in parts:
            part.choose(tokens)
            if any(broken[part.meant]):
                self._fail(part.chunk.sequence.request, "the model's output is not a number")
        for part in parts:
            self._complete(part, logits)
        for part in parts:
            self._judge(part)
            for sequence, chosen in zip(part.sampled, part.chosen, strict=True):
                self._continue(sequence, chosen)

    def _open(self, part: Part) -> None:
        """Find out which choices go on from a chunk, and how."""
        sequence = part.chunk.sequence
        if not part.chunk.samples:
            return
        if sequence.num_output:
            part.sampled.append(sequence)
            return
        for choice in self._branch(sequence):
            forced = self._forced(choice)
            ended = choice.constraint is not None and choice.constraint.finished
            if forced or ended or not choice.request.max_tokens:
                part.given.append((choice, forced))
            else:
                part.sampled.append(choice)

    def _branch(self, sequence: Sequence) -> list[Sequence]:
        """All choices of a request whose prompt has just been completed."""
        request = sequence.request
        request.branched = True
        siblings = [Sequence(request, index) for index in range(1, request.sampling.n)]
        for sibling in siblings:
            self._scheduler.fork(sequence, sibling)
        return [sequence, *siblings]

    def _fail(self, request: Request, message: str) -> None:
        if self._requests.pop(request.id, None) is not None:
            for sequence in request.sequences:
                self._scheduler.remove(sequence)
            request.sequences.clear()
            self._events.append((request.id, Failed(message)))

    def _complete(self, part: Part, logits: Tensor) -> None:
        """Tell and keep what concerns the prompt, and begin choices that need no logits."""
        chunk, request = part.chunk, part.chunk.sequence.request
        if chunk.sequence.ended:
            return  # its request has failed
        if request.lacks_prompt_logprobs:
            self._collect(chunk, logits[part.start : part.stop])
        if chunk.samples and not chunk.sequence.num_output:
            self._events.append((request.id, Prefilled(tuple(request.prompt_logprobs))))
            for position, ttl in request.breakpoints:
                self._cache.retain(request.namespace, request.prompt[:position], ttl)
        for sequence, forced in part.given:
            self._append(sequence, [Sampled(token) for token in forced])

    def _collect(self, chunk: Chunk, logits: Tensor) -> None:
        """Add log-probabilities of the prompt; those known from before a preemption stay."""
        request = chunk.sequence.request
        first = len(request.prompt_logprobs)  # the position whose logits are wanted next
        tokens = request.prompt[first + 1 : chunk.start + chunk.count + 1]
        top = request.sampling.prompt_logprobs or 0
        request.prompt_logprobs += prompt_logprobs(logits[first - chunk.start :], tokens, top)

    @staticmethod
    def _forced(sequence: Sequence) -> list[int]:
        """Tokens that need no logits; none where these are asked for."""
        if sequence.constraint is None or sequence.request.sampling.logprobs is not None:
            return []
        return sequence.constraint.forced()

    def _judge(self, part: Part) -> None:
        """Count a draft, and let the next one depend on it."""
        draft = part.chunk.draft
        if draft:
            part.chunk.sequence.lookup.judge(len(draft), part.right)
            self.drafted_tokens += len(draft)
            self.accepted_tokens += part.right

    def _continue(self, sequence: Sequence, chosen: list[Sampled]) -> None:
        """Go on with what was sampled; all but the last of it has been computed already."""
        if sequence.ended:
            return  # another choice of the request has failed
        computed = len(chosen) - 1
        if sequence.constraint is not None:
            try:
                sequence.constraint.advance(chosen[0].token_id)
            except GenerationFailed as error:
                self._fail(sequence.request, error.message)
                return
            chosen = chosen + [Sampled(token) for token in self._forced(sequence)]
        self._append(sequence, chosen, computed)

    def _append(self, sequence: Sequence, tokens: list[Sampled], computed: int = 0) -> None:
        """Go on with `tokens`, up to an end token or `max_tokens`; the first `computed` have KV."""
        request, reason = sequence.request, None
        room = request.max_tokens - sequence.num_output
        for token in tokens[:room]:
            sequence.tokens.append(token.token_id)
            if token.token_id in request.end_token_ids:
                reason = FinishReason.STOP
                break
            self._events.append((request.id, Token(sequence.index, token.token_id, token.logprob)))
        else:
            constraint = sequence.constraint
            if room and constraint and constraint.finished and len(tokens) <= room:
                reason = FinishReason.STOP
            elif len(tokens) >= room:
                reason = FinishReason.LENGTH
        if computed:
            sequence.num_computed += computed
            self._cache.commit(sequence.row, sequence.num_computed)
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a choice that is complete."""
        self._scheduler.close(sequence)
        self._end(sequence, reason)

    def _cut(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a choice from outside, wherever it is."""
        self._scheduler.remove(sequence)
        self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        request.sequences.remove(sequence)
        event = Finished(sequence.index, reason, sequence.num_output)
        self._events.append((request.id, event))
        if not request.sequences:
            del self._requests[request.id]
