"""The engine over a model without weights, driven step by step on the test's own thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from torch import Tensor

from ragcache.bench.hashing import HashRunner
from ragcache.engine.answers import Events
from ragcache.engine.batch import StepBatch
from ragcache.engine.loop import Engine
from ragcache.engine.pace import Pace
from ragcache.engine.request import Request
from ragcache.engine.scheduler import Scheduler
from ragcache.engine.step_cost import StepCost
from ragcache.errors import EngineUnavailable
from ragcache.prefix.cache import PrefixCache
from ragcache.types import (
    Admitted,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    SamplingParams,
    Token,
    TokenLogprob,
)

VOCAB = 61
BLOCK = 4


@dataclass(frozen=True)
class Steps:
    """A grammar in which output token i is one of `allowed[i]`, and which then is finished.

    With `forcing`, its constraints tell when only one token is left.
    """

    allowed: list[set[int]]
    forcing: bool = True

    def constraint(self) -> State:
        return State(self)


class State:
    """A constraint of `Steps`."""

    def __init__(self, grammar: Steps) -> None:
        self.grammar = grammar
        self.position = 0

    @property
    def finished(self) -> bool:
        return self.position == len(self.grammar.allowed)

    def fill_mask(self, bits: np.ndarray) -> None:
        assert not self.finished
        flags = np.zeros(32 * len(bits), dtype=np.uint8)
        flags[list(self.grammar.allowed[self.position])] = 1
        bits[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def advance(self, token_id: int) -> None:
        assert token_id in self.grammar.allowed[self.position]
        self.position += 1

    def forced(self) -> list[int]:
        run: list[int] = []
        while self.grammar.forcing and not self.finished:
            if len(self.grammar.allowed[self.position]) > 1:
                break
            run += self.grammar.allowed[self.position]
            self.position += 1
        return run


@dataclass
class Outcome:
    """Everything that one request was told."""

    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)  # of choice 0
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
                case Prefilled(logprobs):
                    assert outcome.cached_tokens is not None
                    assert outcome.prompt_logprobs is None
                    assert not outcome.tokens
                    outcome.prompt_logprobs = logprobs
                case Token(index, token_id, logprob):
                    assert outcome.prompt_logprobs is not None
                    assert index not in outcome.finished
                    outcome.tokens.setdefault(index, []).append(token_id)
                    if index == 0:
                        outcome.logprobs.append(logprob)
                case Failed(message):
                    assert outcome.failure is None
                    outcome.failure = message
                case Finished(index, reason, num_tokens):
                    assert index not in outcome.finished
                    outcome.finished[index] = reason
                    outcome.num_tokens[index] = num_tokens

    def fail(self, error: EngineUnavailable) -> None:
        self.failure = error


class Timed(HashRunner):
    """On a clock of its own, a pass takes `FIXED` seconds, and more for tokens and context."""

    FIXED, TOKEN, PAIR = 20e-3, 1e-3, 1e-6
    now = 0.0

    def run(self, batch: StepBatch, *meanwhile) -> Tensor:
        counts, lengths = batch.layout.cu_q.diff(), batch.layout.kv_len
        pairs = (counts * (lengths - counts / 2)).sum()
        self.now += self.FIXED + self.TOKEN * float(counts.sum()) + self.PAIR * float(pairs)
        return super().run(batch, *meanwhile)


class Echo(Timed):
    """It likes to say what came `PERIOD` tokens ago, but not always: a draft is right or wrong."""

    PERIOD, LIKING, MOOD = 5, 7.0, 8

    def logits(self, context: np.ndarray) -> Tensor:
        values = super().logits(context)
        if len(context) >= self.PERIOD and context.sum() % self.MOOD:
            values[context[-self.PERIOD]] += self.LIKING
        return values


class Bench:
    """An engine whose steps the test takes itself; `check` runs after each one."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_batch_tokens: int = 32,
        max_running: int = 8,
        share: bool = True,
        host_blocks: int = 0,
        max_step_time: float | None = None,
        max_draft: int = 0,
        echo: bool = False,
    ) -> None:
        self.model = (Echo if echo else Timed)(num_blocks, BLOCK, VOCAB, host_blocks)
        self.cache = PrefixCache(num_blocks, BLOCK, share=share, host_blocks=host_blocks)
        self.scheduler = Scheduler(
            self.cache,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            cost=None if max_step_time is None else StepCost(max_step_time),
            max_draft=max_draft,
        )
        self.sink = Collector()
        self.engine = Engine(self.model, self.scheduler, self.sink)
        self.engine._pace = Pace(lambda: self.model.now)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 8, **options) -> None:
        namespace = options.pop("namespace", b"n")
        eos = options.pop("eos", frozenset())
        names = {"grammar", "breakpoints", "cacheable"} & options.keys()
        rest = {name: options.pop(name) for name in names}
        sampling = SamplingParams(max_tokens, **{"temperature": 0.0, **options})
        self.engine.submit(Request(request_id, prompt, sampling, namespace, eos, **rest))

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
            if not self.scheduler.busy:
                counts = self.cache.counts()
                assert counts.held == self.cache.host.pool.counts().held == 0
                return self.sink.outcomes
            self.step()
        raise AssertionError("the engine did not come to rest")

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What the model says without any cache, batch or chunk."""
        return self.constrained(prompt, [set(range(VOCAB))] * count)

    def logprobs(self, context: list[int]) -> Tensor:
        """The model's log-probabilities after a context."""
        return self.model.logits(np.asarray(context)).log_softmax(-1)

    def constrained(self, prompt: list[int], allowed: list[set[int]]) -> list[int]:
        """The same with the most likely of the allowed tokens at each position."""
        context = list(prompt)
        for tokens in allowed:
            logits = self.model.logits(np.asarray(context))
            context.append(max(tokens, key=lambda token: float(logits[token])))
        return context[len(prompt) :]


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench


@pytest.fixture
def steps() -> Callable[..., Steps]:
    return Steps
