"""The engine thread: commands in, steps, events out. It knows token ids and no event loop."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from torch import Tensor

from ragcache.engine.batch import build_batch
from ragcache.engine.request import Request, Sequence
from ragcache.engine.runner import Runner
from ragcache.engine.sampler import Sampled, sample
from ragcache.engine.scheduler import Chunk, Scheduler
from ragcache.errors import EngineUnavailable
from ragcache.types import (
    Admitted,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    FinishReason,
    Token,
)

log = logging.getLogger(__name__)

IDLE_CHECK_AFTER = 5.0  # seconds without work after which the prefix cache checks itself

Events = list[tuple[str, EngineEvent]]


class EventSink(Protocol):
    """Where the events of requests go; called on the engine thread, at most once a step."""

    def deliver(self, events: Events) -> None:
        """Take events, each with the id of its request, in order."""

    def fail(self, error: EngineUnavailable) -> None:
        """No request will get any further event."""


class Engine:
    """Runs requests on one thread until `stop`; all public methods may be called from any.

    Every submitted request gets `Admitted`, its tokens, and exactly one `Finished` for each
    choice, unless the engine fails: then the sink is told once, and `failure` is set.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, sink: EventSink) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._sink = sink
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._events: Events = []
        self._replies: set[Future[bool]] = set()
        self._query_tokens = self._hit_tokens = self._computed_tokens = 0
        self._stopping = False
        self.failure: EngineUnavailable | None = None
        self.progressed_at = time.monotonic()  # of the last step or command
        self.stats = self._snapshot()
        self._thread = threading.Thread(target=self._main, name="ragcache-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that runs; unfinished requests fail."""
        self._inbox.put(self._stop)
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._inbox.put(partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """End every choice of a request that still runs; unknown ids are fine."""
        self._inbox.put(partial(self._abort, request_id))

    def finish(self, request_id: str, index: int) -> None:
        """End one choice because its text is complete."""
        self._inbox.put(partial(self._finish_choice, request_id, index))

    def reset_cache(self) -> Future[bool]:
        """Forget all cached blocks; False, and nothing is forgotten, while blocks are held."""
        done = Future[bool]()
        self._replies.add(done)
        self._inbox.put(partial(self._reset, done))
        if self.failure is not None:
            self._fail_replies(self.failure)
        return done

    def _main(self) -> None:
        error = EngineUnavailable("the engine has been stopped")
        try:
            while not self._stopping:
                self._take_commands()
                self._step()
                self._flush()
        except Exception as cause:
            log.exception("the engine thread died")
            error = EngineUnavailable(f"the engine died: {type(cause).__name__}: {cause}")
        self.failure = error
        self._sink.fail(error)
        self._fail_replies(error)

    def _take_commands(self) -> None:
        if not (self._scheduler.running or self._scheduler.waiting):
            self._wait()
        while not self._inbox.empty():
            self._inbox.get()()

    def _wait(self) -> None:
        """Block until there is a command, using a quiet moment to check the accounting."""
        try:
            command = self._inbox.get(timeout=IDLE_CHECK_AFTER)
        except queue.Empty:
            self._check()
            command = self._inbox.get()
        command()
        self._show_progress()  # before the first step: it may be a long one, or hang

    def _show_progress(self) -> None:
        self.progressed_at = time.monotonic()
        self.stats = self._snapshot()

    def _check(self) -> None:
        try:
            self._cache.check()
        except AssertionError:
            log.exception("the accounting of KV blocks is wrong; please report this")

    def _flush(self) -> None:
        self._show_progress()
        events, self._events = self._events, []
        if events:
            self._sink.deliver(events)

    # Commands, run on the engine thread

    def _stop(self) -> None:
        self._stopping = True

    def _add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._scheduler.add(Sequence(request, 0))

    def _abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        unborn = [] if request.branched else range(1, request.sampling.n)
        self._events += [(request_id, Finished(i, FinishReason.ABORT, 0)) for i in unborn]
        for sequence in list(request.sequences):
            self._finish(sequence, FinishReason.ABORT)

    def _finish_choice(self, request_id: str, index: int) -> None:
        request = self._requests.get(request_id)
        for sequence in list(request.sequences) if request else []:
            if sequence.index == index:
                self._finish(sequence, FinishReason.STOP)

    def _reset(self, done: Future[bool]) -> None:
        self._replies.discard(done)
        if not done.set_running_or_notify_cancel():
            return
        free_of_rows = self._cache.counts().held == 0
        if free_of_rows:
            self._cache.reset()
            self.stats = self._snapshot()  # whoever waits for the reply sees its effect
        done.set_result(free_of_rows)

    def _fail_replies(self, error: EngineUnavailable) -> None:
        while self._replies:
            done = self._replies.pop()
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

    # One step

    def _step(self) -> None:
        chunks = self._scheduler.schedule()
        for sequence, hit_tokens in self._scheduler.take_admitted():
            self._announce(sequence, hit_tokens)
        if not chunks:
            return
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        logits = self._runner.run(build_batch(chunks, self._cache))
        self._cache.copies_done()
        self._advance(chunks)
        self._extend(*self._without_failures(sampling, logits))

    def _announce(self, sequence: Sequence, hit_tokens: int) -> None:
        """Tell and count a request's hit once; coming back after preemption is not news."""
        if sequence.index or sequence.num_output or sequence.request.admitted:
            return
        sequence.request.admitted = True
        self._query_tokens += sequence.prompt_len
        self._hit_tokens += hit_tokens
        self._events.append((sequence.request.id, Admitted(hit_tokens)))

    def _advance(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.count
            self._computed_tokens += chunk.count
            self._cache.commit(sequence.row, sequence.num_computed)

    def _extend(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Sample each sequence; a prompt that just completed branches into its n choices."""
        rows: list[int] = []
        branches: list[Sequence] = []
        for row, sequence in enumerate(sequences):
            grown = [sequence, *self._siblings(sequence)]
            rows += [row] * len(grown)
            branches += grown
        if len(rows) > len(sequences):
            logits = logits[rows]
        for sequence, sampled in zip(branches, sample(logits, branches), strict=True):
            self._append(sequence, sampled)

    def _without_failures(
        self, sequences: list[Sequence], logits: Tensor
    ) -> tuple[list[Sequence], Tensor]:
        """Fail the requests whose logits are not numbers; no token could be chosen from them."""
        if not sequences:
            return sequences, logits
        broken = logits.amax(dim=-1).isnan()  # the maximum of a row with a NaN is NaN
        if not broken.any():
            return sequences, logits
        for sequence, failed in zip(sequences, broken.tolist(), strict=True):
            if failed:
                self._fail(sequence.request, "the model's output is not a number")
        kept = [s for s in sequences if s.request.id in self._requests]
        rows = [row for row, s in enumerate(sequences) if s.request.id in self._requests]
        return kept, logits[rows]

    def _fail(self, request: Request, message: str) -> None:
        if self._requests.pop(request.id, None) is not None:
            for sequence in request.sequences:
                self._scheduler.remove(sequence)
            self._events.append((request.id, Failed(message)))

    def _siblings(self, sequence: Sequence) -> list[Sequence]:
        request = sequence.request
        if request.branched:
            return []
        request.branched = True
        siblings = [Sequence(request, index) for index in range(1, request.sampling.n)]
        for sibling in siblings:
            self._scheduler.fork(sequence, sibling)
        return siblings

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        request = sequence.request
        sequence.tokens.append(sampled.token_id)
        if sampled.token_id in request.end_token_ids:
            self._finish(sequence, FinishReason.STOP)
            return
        event = Token(sequence.index, sampled.token_id, sampled.logprob)
        self._events.append((request.id, event))
        if sequence.num_output >= request.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        self._scheduler.remove(sequence)
        request.sequences.remove(sequence)
        event = Finished(sequence.index, reason, sequence.num_output)
        self._events.append((request.id, event))
        if not request.sequences:
            del self._requests[request.id]

    def _snapshot(self) -> EngineStats:
        scheduler, cache = self._scheduler, self._cache
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pool=cache.counts(),
            block_size=cache.block_size,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            evictions=cache.evictions,
            preemptions=scheduler.preemptions,
            computed_tokens=self._computed_tokens,
        )
