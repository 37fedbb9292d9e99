"""What surrounds the kernels in a step, on the device at hand: swaps, and recorded decodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ragcache_kernels.bench.checks import excess
from ragcache_kernels.interface import AttentionBackend
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ragcache.engine.batch import BatchBuilder
from ragcache.engine.fast_model import use_fast_layers
from ragcache.engine.graphs import CudaRecorder, DecodeGraphs, Limits
from ragcache.engine.host_pool import host_pool
from ragcache.engine.pool import KVPool, LayerShape
from ragcache.engine.profile import largest_step
from ragcache.engine.request import Chunk, Request, Sequence
from ragcache.engine.runner import ModelRunner
from ragcache.engine.support import prepare_model
from ragcache.prefix.cache import PrefixCache
from ragcache.types import SamplingParams

BLOCK_SIZE = 16
BLOCKS = 16  # for the sequences below
PROMPTS = (3, 16, 40)  # tokens of sequences that then decode together
DECODES = 4
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class SwapsCheck:
    """Blocks that go to the host and come back to other places, with every bit."""

    dtype: torch.dtype
    blocks: int

    @property
    def name(self) -> str:
        """What is checked."""
        return f"swaps of {self.blocks} blocks, {_name(self.dtype)}"

    def error(self, _backend: AttentionBackend[Any], device: torch.device) -> float:
        """0, or infinity where a block is not what it was."""
        count = self.blocks
        tensors = KVPool([LayerShape(8, 128, 128)] * 2, count, BLOCK_SIZE, self.dtype, device)
        bits = [tensor.view(torch.uint8) for tensor in tensors.tensors]
        for tensor in bits:
            tensor.random_(0, 256)
        expected = [tensor.flip(0).cpu() for tensor in bits]
        host = host_pool(tensors.tensors, count * tensors.block_bytes)
        there = torch.randperm(count).tolist()
        host.swap_out(list(zip(range(count), there, strict=True)))
        host.swap_in([(there[i], count - 1 - i) for i in range(count)])
        found = [tensor.cpu() for tensor in bits]
        host.close()
        return 0.0 if all(map(torch.equal, found, expected)) else math.inf


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """Decode steps of a small model: those that were recorded against those launched anew."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """What is checked."""
        return f"recorded decode steps, {_name(self.dtype)}"

    def error(self, backend: AttentionBackend[Any], device: torch.device) -> float:
        """As `Check.error`; raises AssertionError if a step was not replayed."""
        model = _small_model(device, self.dtype)
        layers = prepare_model(model)
        use_fast_layers(model, backend)
        recorder = _Recorder(device)
        launched = _logits(model, layers, backend, None)
        replayed = _logits(model, layers, backend, recorder)
        if recorder.replays != DECODES:
            raise AssertionError(f"{recorder.replays} of {DECODES} decode steps were replayed")
        return excess(replayed, launched.cpu().double())


class _Recorder:
    """Counts what is replayed; where there is no CUDA, that is the work itself."""

    def __init__(self, device: torch.device) -> None:
        self.replays = 0
        self._record = CudaRecorder() if device.type == "cuda" else lambda work: work

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        replay = self._record(work)

        def counted() -> None:
            self.replays += 1
            replay()

        return counted


def _small_model(device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.for_model("llama", **SHAPE, initializer_range=0.05)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def _logits(
    model: PreTrainedModel,
    layers: list[LayerShape],
    backend: AttentionBackend[Any],
    recorder: _Recorder | None,
) -> Tensor:
    """Logits of the prompts' last tokens and of all decodes after them."""
    tokens, device = BLOCKS * BLOCK_SIZE, model.device
    pool = KVPool(layers, BLOCKS, BLOCK_SIZE, model.dtype, device)
    for tensor in pool.tensors:
        tensor.zero_()
    graphs = None
    if recorder is not None:
        limits = Limits(len(PROMPTS), tokens, tokens, BLOCK_SIZE)
        graphs = DecodeGraphs(backend, device, limits, recorder)
    runner = ModelRunner(model, pool, backend, graphs)
    runner.warm_up(largest_step(len(PROMPTS), len(PROMPTS), BLOCK_SIZE, BLOCK_SIZE))
    cache = PrefixCache(BLOCKS, BLOCK_SIZE, share=False)
    batches, chunks = BatchBuilder(cache), [_first(cache, length) for length in PROMPTS]
    logits = []
    for _ in range(1 + DECODES):
        logits.append(runner.run(batches.build(chunks)).clone())
        for chunk in chunks:
            cache.commit(chunk.sequence.row, chunk.start + chunk.count)
        if layout := batches.prepare(chunks):
            runner.prepare(layout)
        chunks = [_next(cache, chunk) for chunk in chunks]
    return torch.cat(logits)


def _first(cache: PrefixCache, length: int) -> Chunk:
    prompt = [(length + 7 * i) % 500 for i in range(length)]
    sequence = Sequence(Request(f"{length}", prompt, SamplingParams(1), b"", frozenset()), 0)
    cache.admit(sequence.row, cache.plan(sequence.tokens, b""))
    return Chunk(sequence, 0, length)


def _next(cache: PrefixCache, chunk: Chunk) -> Chunk:
    """The next token of a sequence, whatever its logits say."""
    sequence = chunk.sequence
    sequence.num_computed = len(sequence.tokens)
    sequence.tokens.append(11 * len(sequence.tokens) % 500)
    cache.grow(sequence.row, len(sequence.tokens))
    return Chunk(sequence, sequence.num_computed, 1)
