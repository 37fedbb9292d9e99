"""`ragcache bench engine`: our steps against a plain transformers forward of the same model.

Both sides run the same weights, batch, dtype and context, in turns, so that whatever else the
machine does falls on both alike. The plain side is what `generate` does in a step: a forward
pass with a `DynamicCache` and transformers' own attention. Then come a decoding batch with a
grammar on every request against the same batch without, and a stream beside a long prompt with a
bound on the time of steps against none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from ragcache_kernels import AttentionBackend, best_backend, get_backend
from rich.console import Group
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ragcache.bench import constrained, stalls
from ragcache.bench.chunks import admitted
from ragcache.bench.options import EngineBench
from ragcache.engine.attention import NAME
from ragcache.engine.batch import BatchBuilder
from ragcache.engine.constraint import Grammar
from ragcache.engine.fast_model import use_fast_layers
from ragcache.engine.model import (
    choose_device,
    choose_dtype,
    eos_token_ids,
    load_model,
)
from ragcache.engine.pool import KVPool, LayerShape
from ragcache.engine.request import Sequence
from ragcache.engine.runner import ModelRunner
from ragcache.engine.source import find_model
from ragcache.engine.support import prepare_model
from ragcache.prefix.cache import PrefixCache
from ragcache.prompt.grammar import GrammarCompiler
from ragcache.prompt.loader import load_tokenizer
from ragcache.types import OutputRules

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences with `context` tokens of KV, each computing `query` tokens more."""

    batch: int
    context: int
    query: int

    @property
    def name(self) -> str:
        """How the table calls it."""
        kind = "decode" if self.query == 1 else "prefill"
        return f"{kind} {self.batch} x {self.query} over {self.context}"


STALLS = 2  # rounds, of some tens of seconds on a CPU
BATCH = Case(8, 1400, 1)
CASES = (Case(1, 1400, 1), BATCH, Case(1, 0, 512), Case(1, 1024, 512))


def run(options: EngineBench) -> dict[str, Any]:
    """Measure every case; seconds are medians of the rounds, ratios are ours ÷ plain."""
    device = choose_device("auto")
    dtype = choose_dtype(options.dtype, device)
    source = find_model(options.model)
    model = load_model(source, device, dtype)
    layers = prepare_model(model)
    dims = (max(layer.key_dim, layer.value_dim) for layer in layers)
    backend = get_backend(best_backend(device, dtype, dims))
    use_fast_layers(model, backend)
    sides = _Sides(model, layers, backend)
    cases = {
        case.name: sides.measure(case, options.repeats)
        for case in track(CASES, description="engine")
    }
    grammar = sides.measure_grammar(_json_grammar(model, source.location), options.repeats)
    return {
        "dtype": str(dtype),
        "backend": backend.name,
        "threads": torch.get_num_threads(),
        "cases": cases,
        "grammar_throughput_ratio": grammar,
        "stalls": sides.measure_stalls(options.max_step_time, STALLS),
    }


def _json_grammar(model: PreTrainedModel, location: str) -> Grammar:
    compiler = GrammarCompiler(
        load_tokenizer(location),
        vocab_size=model.config.get_text_config().vocab_size,
        eos_token_ids=eos_token_ids(model),
        syntax=None,
    )
    rules = OutputRules(tool_choice="none", schema=constrained.SCHEMA)
    grammar = compiler.compile((), rules)
    assert grammar is not None  # a schema leaves no output free
    return grammar


def render(results: dict[str, Any]) -> Group:
    """Lay the results of `run` out as tables."""
    title = f"{results['backend']}, {results['dtype']}, {results['threads']} threads"
    table = Table(title=f"{title}, milliseconds a step")
    for column in ("step", "ragcache", "transformers", "ratio"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, case in results["cases"].items():
        ours, plain = (f"{case[side] * 1e3:.1f}" for side in ("ours", "plain"))
        table.add_row(name, ours, plain, f"{case['ratio']:.2f}")
    ratio = results["grammar_throughput_ratio"]
    table.caption = f"{BATCH.name}: throughput with a grammar on each ÷ without: {ratio:.2f}"
    return Group(table, stalls.render(results["stalls"]))


class _Sides:
    """One model, run by a step of ours and as transformers wrote it, in turns."""

    def __init__(
        self, model: PreTrainedModel, layers: list[LayerShape], backend: AttentionBackend[Any]
    ) -> None:
        self._model = model
        self._layers = layers
        self._backend = backend

    def measure(self, case: Case, repeats: int) -> dict[str, float]:
        ours, plain = self._paged_step(case), self._plain_step(case)
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        for _ in range(repeats + 1):  # the first round warms up
            self._model.set_attn_implementation(NAME)
            times["ours"].append(ours())
            self._model.set_attn_implementation("sdpa")
            times["plain"].append(plain())
        result = {side: median(values[1:]) for side, values in times.items()}
        pairs = zip(times["ours"][1:], times["plain"][1:], strict=True)
        return {**result, "ratio": median(mine / theirs for mine, theirs in pairs)}

    def measure_grammar(self, grammar: Grammar, repeats: int) -> float:
        """Throughput of `BATCH` with a grammar on each request ÷ without."""
        self._model.set_attn_implementation(NAME)
        forward, sequences = self._paged(BATCH)
        return constrained.throughput(grammar, forward, sequences, repeats)

    def measure_stalls(self, max_step_time: float, repeats: int) -> dict[str, Any]:
        """See `stalls.measure`."""
        self._model.set_attn_implementation(NAME)
        return stalls.measure(self._runner(stalls.NUM_BLOCKS), max_step_time, repeats)

    def _paged_step(self, case: Case) -> Callable[[], float]:
        forward, _ = self._paged(case)

        def step() -> float:
            started = perf_counter()
            forward().argmax(dim=-1).tolist()
            return perf_counter() - started

        return step

    def _paged(self, case: Case) -> tuple[Callable[[], Tensor], list[Sequence]]:
        """A forward pass of our engine, which may be repeated, and its sequences."""
        total = case.context + case.query
        blocks = case.batch * -(-total // BLOCK_SIZE)
        cache = PrefixCache(blocks, BLOCK_SIZE, share=False)
        runner = self._runner(blocks)
        chunks = admitted(cache, case.batch, case.context, case.query)
        sequences = [chunk.sequence for chunk in chunks]
        batches = BatchBuilder(cache)
        return lambda: runner.run(batches.build(chunks)), sequences

    def _runner(self, blocks: int) -> ModelRunner:
        model = self._model
        pool = KVPool(self._layers, blocks, BLOCK_SIZE, model.dtype, model.device)
        for tensor in pool.tensors:
            tensor.normal_()
        return ModelRunner(model, pool, self._backend)

    def _plain_step(self, case: Case) -> Callable[[], float]:
        model = self._model
        ids = torch.ones((case.batch, case.query), dtype=torch.int64, device=model.device)
        positions = torch.arange(case.query, device=model.device)[None] + case.context
        keys_and_values = [self._random(case, layer) for layer in self._layers]

        @torch.inference_mode()
        def step() -> float:
            cache = DynamicCache(config=model.config)
            for index, (key, value) in enumerate(keys_and_values):
                cache.update(key, value, index)
            started = perf_counter()
            output = model(
                input_ids=ids,
                position_ids=positions.expand(case.batch, -1),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            output.logits.argmax(dim=-1).tolist()
            return perf_counter() - started

        return step

    def _random(self, case: Case, layer: LayerShape) -> tuple[Tensor, Tensor]:
        def normal(dim: int) -> Tensor:
            shape = (case.batch, layer.num_kv_heads, case.context, dim)
            return torch.randn(shape, dtype=self._model.dtype, device=self._model.device)

        return normal(layer.key_dim), normal(layer.value_dim)
