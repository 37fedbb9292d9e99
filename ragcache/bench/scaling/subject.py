"""An engine whose prompts are found in its cache, though nobody has computed them.

Their blocks are published in the index over a pool of random KV: what a step takes depends on how
many tokens it reads, not on what they are, and long contexts need not be computed first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch

from ragcache.bench.decode import Steps
from ragcache.bench.settings import apart
from ragcache.config import DtypeName
from ragcache.engine.assembly import max_model_len
from ragcache.engine.loop import Engine
from ragcache.engine.request import Request
from ragcache.engine.scheduler import Scheduler
from ragcache.loading import load_runner
from ragcache.prefix.cache import PrefixCache
from ragcache.types import SamplingParams

NAMESPACE = b""
OUTPUT, WARM_UP = 16, 4  # tokens of each answer, and the steps among them that do not count


class Subject:
    """A model ready to run; every measurement has a new index over the same pool.

    Raises ConfigError where the model cannot be loaded.
    """

    def __init__(self, model: str | None, dtype: DtypeName) -> None:
        self._settings = apart(model=model, dtype=dtype)
        loaded = load_runner(self._settings, lambda: None)
        self._runner, self._num_blocks = loaded.runner, loaded.num_blocks
        self._vocab_size = loaded.model.config.get_text_config().vocab_size
        self._written: set[int] = set()  # blocks with random KV; others may hold what is no number
        self._random = random.Random(0)
        self.max_len = max_model_len(loaded.model, self._settings)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._settings.block_size

    def fits(self, batch: int, context: int) -> bool:
        """Whether the pool holds so many sequences."""
        return self._blocks(batch, context) <= self._num_blocks

    def decode(self, batch: int, context: int) -> float:
        """Seconds from step to step while `batch` sequences over `context` tokens get a token."""
        prompts = [self._tokens(context) for _ in range(batch)]
        steps, _ = self._run(prompts, prompts, OUTPUT)
        return median(after - before for before, after in pairwise(steps[WARM_UP:]))

    def prefill(self, prompt: int, uncached: int) -> float:
        """Seconds to the first token, where the last `uncached` tokens of the prompt are new."""
        tokens = self._tokens(prompt)
        steps, started = self._run([tokens], [tokens[: prompt - uncached]], 1)
        return steps[0] - started

    def close(self) -> None:
        """Give the pool back."""
        self._runner.close()

    def _blocks(self, batch: int, context: int) -> int:
        """Blocks of so many sequences with their answers, and the one more that each may need."""
        return batch * (-(-(context + OUTPUT) // self.block_size) + 1)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def _run(
        self, prompts: Sequence[list[int]], cached: Sequence[list[int]], tokens: int
    ) -> tuple[list[float], float]:
        """When all of them got a token, each time, and when they were asked for."""
        blocks, steps = self._blocks(len(prompts), len(prompts[0])), Steps(len(prompts))
        scheduler = Scheduler(
            self._index(blocks, cached),
            max_batch_tokens=self._settings.max_batch_tokens,
            max_running=len(prompts),
        )
        engine = Engine(self._runner, scheduler, steps)
        sampling = SamplingParams(tokens, temperature=0)
        for number, prompt in enumerate(prompts):  # before it starts: they begin together
            engine.submit(Request(f"{number}", prompt, sampling, NAMESPACE, frozenset()))
        started = perf_counter()
        engine.start()
        try:
            steps.ended.result()
        finally:
            engine.stop()
        return steps.times, started

    def _index(self, blocks: int, cached: Sequence[list[int]]) -> PrefixCache:
        """An index in which these tokens are found, as far as they fill blocks."""
        index = PrefixCache(blocks, self.block_size)
        for number, tokens in enumerate(cached):
            row = index.admit(number, index.plan(tokens, NAMESPACE))
            assert row is not None  # `fits` says so
            self._write(row.table)
            index.commit(number, len(tokens))
            index.release(number)
        return index

    def _write(self, blocks: Sequence[int]) -> None:
        new = sorted(set(blocks) - self._written)
        for tensor in self._runner.pool.tensors:
            tensor[new] = torch.randn(tensor.shape[1:], device=tensor.device).to(tensor.dtype)
        self._written.update(new)
