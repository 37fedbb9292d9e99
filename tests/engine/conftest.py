"""The engine over a model without weights, driven step by step on the test's own thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from ragcache.bench.hashing import HashRunner
from ragcache.engine.loop import Engine, Events
from ragcache.engine.request import Request
from ragcache.engine.scheduler import Scheduler
from ragcache.errors import EngineUnavailable
from ragcache.prefix.cache import PrefixCache
from ragcache.types import Admitted, Failed, Finished, FinishReason, SamplingParams, Token

VOCAB = 61
BLOCK = 4


@dataclass
class Outcome:
    """Everything that one request was told."""

    cached_tokens: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)
    failure: str | None = None


class Collector:
    """An event sink that keeps what it is given and refuses a second end of a choice."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.failure: EngineUnavailable | None = None

    def deliver(self, events: Events) -> None:
        for request_id, event in events:
            outcome = self.outcomes.setdefault(request_id, Outcome())
            match event:
                case Admitted(cached_tokens):
                    assert outcome.cached_tokens is None
                    outcome.cached_tokens = cached_tokens
                case Token(index, token_id):
                    assert index not in outcome.finished
                    outcome.tokens.setdefault(index, []).append(token_id)
                case Failed(message):
                    assert outcome.failure is None
                    outcome.failure = message
                case Finished(index, reason, num_tokens):
                    assert index not in outcome.finished
                    outcome.finished[index] = reason
                    outcome.num_tokens[index] = num_tokens

    def fail(self, error: EngineUnavailable) -> None:
        self.failure = error


class Bench:
    """An engine whose steps the test takes itself; `check` runs after each one."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_batch_tokens: int = 32,
        max_running: int = 8,
        share: bool = True,
    ) -> None:
        self.model = HashRunner(num_blocks, BLOCK, VOCAB)
        self.cache = PrefixCache(num_blocks, BLOCK, share=share)
        self.scheduler = Scheduler(
            self.cache, max_batch_tokens=max_batch_tokens, max_running=max_running
        )
        self.sink = Collector()
        self.engine = Engine(self.model, self.scheduler, self.sink)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 8, **options) -> None:
        namespace = options.pop("namespace", b"n")
        eos = options.pop("eos", frozenset())
        sampling = SamplingParams(max_tokens, **{"temperature": 0.0, **options})
        self.engine.submit(Request(request_id, prompt, sampling, namespace, eos))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            while not self.engine._inbox.empty():
                self.engine._inbox.get()()
            self.engine._step()
            self.engine._flush()
            self.cache.check()

    def drain(self, limit: int = 2000) -> dict[str, Outcome]:
        self.step()
        for _ in range(limit):
            if not (self.scheduler.running or self.scheduler.waiting):
                counts = self.cache.counts()
                assert counts.held == 0
                return self.sink.outcomes
            self.step()
        raise AssertionError("the engine did not come to rest")

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What the model says without any cache, batch or chunk."""
        context = list(prompt)
        for _ in range(count):
            context.append(int(self.model.logits(np.asarray(context)).argmax()))
        return context[len(prompt) :]


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench
