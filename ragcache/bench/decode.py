"""Decode steps of a random model against the time in which its weights can be read."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ragcache.bench.settings import apart
from ragcache.engine.answers import Events
from ragcache.engine.assembly import build_runner
from ragcache.engine.loop import Engine
from ragcache.engine.request import Request
from ragcache.engine.scheduler import Scheduler
from ragcache.errors import EngineUnavailable
from ragcache.prefix.cache import PrefixCache
from ragcache.types import Finished, SamplingParams, Token

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
WARM_UP = 3  # steps that do not count


def decode_step(
    shape: dict[str, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int,
    context: int,
    rounds: int,
    bytes_per_second: float,
) -> dict[str, Any]:
    """Seconds from step to step of an engine that decodes `batch` sequences: the median of rounds.

    They hold `context` tokens to begin with, and get a token each in every step.
    """
    with device:
        config = AutoConfig.for_model("llama", **shape)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    weights = _weights(model)
    tokens = WARM_UP + rounds + batch  # some begin while others' prompts are still computed
    times = _step_times(model, batch, context, tokens)
    return {
        "key": "decode step",
        "name": f"step of {weights / 1e9:.1f} GB weights, decode {batch} over {context}",
        "seconds": median(times[WARM_UP:]),
        "memory_seconds": weights / bytes_per_second,
        "compute_seconds": 0.0,
    }


def _step_times(model: PreTrainedModel, batch: int, context: int, tokens: int) -> list[float]:
    """Seconds between the steps in which all sequences of the batch get a token."""
    size = 16
    blocks = (batch + 1) * -(-(context + tokens) // size)  # the scheduler keeps some in reserve
    settings = apart(block_size=size, kv_cache_blocks=blocks, max_running=batch)
    runner, num_blocks = build_runner(model, settings)
    scheduler = Scheduler(
        PrefixCache(num_blocks, size, share=False),
        max_batch_tokens=settings.max_batch_tokens,
        max_running=batch,
    )
    steps = Steps(batch)
    engine = Engine(runner, scheduler, steps)
    engine.start()
    sampling = SamplingParams(tokens, temperature=0)
    for i in range(batch):
        engine.submit(Request(f"{i}", [i] * context, sampling, b"", frozenset()))
    steps.ended.result()
    engine.stop()
    return [after - before for before, after in pairwise(steps.times)]


class Steps:
    """Where the events of an engine go: `times` are those of steps with a token for everyone."""

    def __init__(self, batch: int) -> None:
        self.times: list[float] = []
        self.ended = Future[None]()
        self._batch = batch
        self._finished = 0

    def deliver(self, events: Events) -> None:
        """See `EventSink`."""
        if sum(isinstance(event, Token) for _, event in events) == self._batch:
            self.times.append(perf_counter())
        self._finished += sum(isinstance(event, Finished) for _, event in events)
        if self._finished == self._batch and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: EngineUnavailable) -> None:
        """See `EventSink`; also called when the engine is stopped."""
        if not self.ended.done():
            self.ended.set_exception(error)


def _weights(model: PreTrainedModel) -> int:
    """Bytes that every step reads: of a table of embeddings it reads some rows only."""
    table = model.get_input_embeddings().weight
    parameters = [each for each in model.parameters() if each is not table]
    if model.config.tie_word_embeddings:
        parameters.append(table)
    return sum(each.numel() * each.itemsize for each in parameters)
