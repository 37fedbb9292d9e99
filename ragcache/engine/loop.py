"""The engine thread: commands in, steps, events out. It knows token ids and no event loop."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from ragcache.engine.answers import Answers, Events
from ragcache.engine.batch import BatchBuilder
from ragcache.engine.pace import Pace
from ragcache.engine.request import Chunk, Request
from ragcache.engine.runner import Runner
from ragcache.engine.scheduler import Scheduler
from ragcache.errors import EngineUnavailable
from ragcache.types import EngineStats, Histogram, HostStats, HotPrefix

T = TypeVar("T")

log = logging.getLogger(__name__)

STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
STEP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1, 2, 5, 10)
IDLE_CHECK_AFTER = 5.0  # seconds without work after which the prefix cache checks itself
STOP_WITHIN = 10.0  # seconds that the last step may take before it is left to itself


class EventSink(Protocol):
    """Where the events of requests go.

    The engine calls it on its own thread, at most once a step and while the next one is being
    computed; behind a `Messenger` it is called on that one's thread.
    """

    def deliver(self, events: Events) -> None:
        """Take events, each with the id of its request, in order."""

    def fail(self, error: EngineUnavailable) -> None:
        """No request will get any further event."""


class Engine:
    """Runs requests on one thread until `stop`; all public methods may be called from any.

    Every submitted request gets `Admitted`, `Prefilled`, its tokens, and exactly one `Finished`
    for each choice, unless the engine fails: then the sink is told once, and `failure` is set.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, sink: EventSink) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._sink = sink
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._batches = BatchBuilder(scheduler.cache)
        self._answers = Answers(scheduler)
        self._replies: set[Future[Any]] = set()
        self._computed_tokens = 0
        self._step_tokens = Histogram(STEP_TOKENS)
        self._step_seconds = Histogram(STEP_SECONDS)
        self._pace = Pace()
        self._stopping = False
        self.failure: EngineUnavailable | None = None
        self._busy_since: float | None = None  # the last step, or the end of idleness; None: idle
        self.stats = self._snapshot()
        self._thread = threading.Thread(target=self._main, name="ragcache-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that runs; unfinished requests fail."""
        self._inbox.put(self._stop)
        self._thread.join(STOP_WITHIN)
        if self._thread.is_alive():
            log.error("the engine thread hangs and is abandoned at:\n%s", self.stack())

    @property
    def stalled(self) -> float:
        """Seconds since the last step while there was work to do; 0 when idle or at its end."""
        since = self._busy_since
        return 0.0 if since is None or self.failure else time.monotonic() - since

    def stack(self) -> str:
        """What the thread is doing, as a traceback shows it."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "no thread"

    def fail(self, reason: str) -> None:
        """End the thread with an error, because its runner can run no more."""
        self._inbox.put(partial(self._die, reason))

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._inbox.put(partial(self._answers.add, request))

    def abort(self, request_id: str) -> None:
        """End every choice of a request that still runs; unknown ids are fine."""
        self._inbox.put(partial(self._answers.abort, request_id))

    def finish(self, request_id: str, index: int) -> None:
        """End one choice because its text is complete."""
        self._inbox.put(partial(self._answers.finish, request_id, index))

    def drop(self, owner: bytes) -> Future[int]:
        """Forget the blocks of all namespaces that begin with `owner`; gives their number.

        Requests that run go on with their own blocks, which nobody else will find.
        """
        return self._ask(partial(self._cache.drop, owner), changes=True)

    def hottest(self, owner: bytes, count: int) -> Future[list[HotPrefix]]:
        """The prefixes that an owner's prompts share most, see `PrefixCache.hottest`."""
        return self._ask(partial(self._cache.hottest, owner, count))

    def check(self) -> Future[None]:
        """Recount the blocks of the cache; the future raises AssertionError for what is wrong."""
        return self._ask(self._cache.check)

    def _ask(self, work: Callable[[], T], *, changes: bool = False) -> Future[T]:
        """Have something done on the engine thread, between two steps.

        Who asks gets what `work` raises; the engine goes on, unless that may have left a change
        half done.
        """
        done = Future[T]()
        self._replies.add(done)
        self._inbox.put(partial(self._reply, work, done, changes))
        if self.failure is not None:
            self._fail_replies(self.failure)
        return done

    def _main(self) -> None:
        error = EngineUnavailable("the engine has been stopped")
        try:
            while not self._stopping:
                self._take_commands()
                self._step()
                if not self._scheduler.busy:
                    self._flush()
            self._flush()
        except Exception:
            log.exception("the engine thread died")
            error = EngineUnavailable("the engine has failed; the server's log tells why")
            self._tell_last()
        self.failure = error
        self.stats = self.stats.ended()
        try:
            self._fail_replies(error)
            self._sink.fail(error)
        finally:
            self._runner.close()

    def _take_commands(self) -> None:
        if not self._scheduler.busy:
            self._wait()
        while not self._inbox.empty():
            self._inbox.get()()

    def _wait(self) -> None:
        """Block until there is a command, using a quiet moment to check the accounting."""
        self._busy_since = None
        try:
            command = self._inbox.get(timeout=IDLE_CHECK_AFTER)
        except queue.Empty:
            self._check()
            command = self._inbox.get()
        self._busy_since = time.monotonic()
        command()
        self.stats = self._snapshot()  # before the first step: it may be a long one, or hang

    def _check(self) -> None:
        try:
            self._cache.check()
        except Exception:
            log.exception("the accounting of KV blocks is wrong; please report this")

    def _flush(self) -> None:
        self.stats = self._snapshot()
        self._tell()

    def _tell(self) -> None:
        events = self._answers.take_events()
        if events:
            self._sink.deliver(events)

    def _tell_last(self) -> None:
        """Tell what came of the last step, if it can be; no accounts can be relied on any more."""
        try:
            self._tell()
        except Exception:
            log.exception("the last events are lost")

    # Commands, run on the engine thread

    def _stop(self) -> None:
        self._stopping = True

    @staticmethod
    def _die(reason: str) -> None:
        raise RuntimeError(reason)

    def _reply(self, work: Callable[[], T], done: Future[T], changes: bool) -> None:
        self._replies.discard(done)
        if not done.set_running_or_notify_cancel():
            return
        try:
            answer = work()
        except Exception as error:
            done.set_exception(error)
            if changes:
                raise
            return
        self.stats = self._snapshot()  # whoever waits for the reply sees its effect
        done.set_result(answer)

    def _fail_replies(self, error: EngineUnavailable) -> None:
        while self._replies:
            done = self._replies.pop()
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

    # One step

    def _step(self) -> None:
        chunks = self._scheduler.schedule()
        if admitted := self._scheduler.take_admitted():
            for sequence, row in admitted:
                self._answers.announce(sequence, row)
        if not chunks:
            self._flush()
            return
        self._pace.begin()
        logits = self._runner.run(self._batches.build(chunks), self._flush)
        self._busy_since = time.monotonic()
        self._cache.copies_done()
        self._advance(chunks)
        if layout := self._batches.prepare(chunks):  # a GPU is still at work
            self._runner.prepare(layout)
        awaited = any(chunk.num_logits for chunk in chunks)  # known before they get tokens
        self._answers.extend(chunks, logits)
        tokens = sum(chunk.count for chunk in chunks)
        self._step_tokens.observe(tokens)
        seconds = self._pace.end(tokens, awaited=awaited)
        if seconds is not None:
            self._timed(seconds)

    def _timed(self, seconds: float) -> None:
        self._step_seconds.observe(seconds)
        if self._scheduler.cost is not None:
            self._scheduler.cost.end(seconds)

    def _advance(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.settled
            self._computed_tokens += chunk.count
            self._cache.commit(sequence.row, sequence.num_computed)
            if sequence.ended:  # this was the step that it stayed for
                self._scheduler.remove(sequence)

    def _snapshot(self) -> EngineStats:
        scheduler, cache = self._scheduler, self._cache
        return EngineStats(
            running=len(scheduler.running) + len(scheduler.closing),
            waiting=len(scheduler.waiting),
            pool=cache.counts(),
            block_size=cache.block_size,
            query_tokens=self._answers.query_tokens,
            hit_tokens=self._answers.hit_tokens,
            evictions=cache.evictions,
            preemptions=scheduler.preemptions,
            drafted_tokens=self._answers.drafted_tokens,
            accepted_tokens=self._answers.accepted_tokens,
            computed_tokens=self._computed_tokens,
            prefill_rate=self._pace.best,
            retained=cache.retained,
            host=self._host_stats(),
            block_times=cache.block_times(),
            step_tokens=self._step_tokens.copy(),
            step_seconds=self._step_seconds.copy(),
        )

    def _host_stats(self) -> HostStats | None:
        host = self._cache.host
        if not host.pool.blocks:
            return None
        return HostStats(
            pool=host.pool.counts(),
            hit_tokens=self._answers.host_hit_tokens,
            evictions=host.evictions,
            swapped_out=host.swap_outs.total,
            swapped_in=host.swap_ins.total,
        )
