"""`ragcache bench quality`: what quantised weights lose, against the same model without.

Both read the same text as the server would, in one prefill, and tell for each position what they
expect next. Perplexity is about the text's own tokens; the other figures are about how far the two
models' expectations are apart (Kullback-Leibler divergence, in nats).
"""

from __future__ import annotations

import random
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from ragcache.bench.options import QualityBench
from ragcache.bench.prose import prose
from ragcache.config import QuantizationName, ServeSettings
from ragcache.engine.batch import BatchBuilder
from ragcache.engine.request import Chunk, Request, Sequence
from ragcache.engine.source import find_model
from ragcache.loading import load_runner
from ragcache.prefix.cache import PrefixCache
from ragcache.prompt.loader import load_tokenizer
from ragcache.types import SamplingParams


def run(options: QualityBench) -> dict[str, Any]:
    """Both models' logits over one text, compared; raises ConfigError as `serve` does."""
    source = find_model(options.model)
    tokens = _tokens(options, source.location)
    plain, quantised = (_logits(options, name, tokens) for name in (None, options.quantization))
    names = {"model": source.name, "quantization": options.quantization}
    return names | compare(plain, quantised, torch.tensor(tokens))


def compare(plain: Tensor, quantised: Tensor, tokens: Tensor) -> dict[str, Any]:
    """Figures of two models' logits `[T, V]` over the same tokens `[T]`."""
    ours, theirs = (F.log_softmax(each[:-1].double(), dim=1) for each in (quantised, plain))
    divergence = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)
    plain_perplexity, perplexity = (
        F.nll_loss(each, tokens[1:]).exp().item() for each in (theirs, ours)
    )
    return {
        "positions": len(divergence),
        "plain_perplexity": plain_perplexity,
        "perplexity": perplexity,
        "perplexity_ratio": perplexity / plain_perplexity,
        "same_greedy_tokens": (ours.argmax(1) == theirs.argmax(1)).double().mean().item(),
        "mean_divergence": divergence.mean().item(),
        "p99_divergence": divergence.quantile(0.99).item(),
    }


def render(results: dict[str, Any]) -> Table:
    """Lay the results of `run` out as a table."""
    table = Table(title=f"{results['model']} over {results['positions']} tokens of text")
    for column in ("", "without", results["quantization"]):
        table.add_column(column, justify="right" if column else "left")
    plain, ours = results["plain_perplexity"], results["perplexity"]
    change = results["perplexity_ratio"] - 1
    table.add_row("perplexity", f"{plain:.3f}", f"{ours:.3f} ({change:+.2%})")
    table.add_row("same most likely token", "", f"{results['same_greedy_tokens']:.1%}")
    table.add_row("divergence, mean", "", f"{results['mean_divergence']:.5f}")
    table.add_row("divergence, 99th percentile", "", f"{results['p99_divergence']:.5f}")
    return table


def _tokens(options: QualityBench, location: str) -> list[int]:
    if options.text is None:
        text = prose(random.Random(options.seed), options.tokens)  # words are tokens, or more
    else:
        text = options.text.read_text()
    encode = load_tokenizer(location).encode
    return encode(text)[: options.tokens]  # type: ignore[no-any-return]


@torch.inference_mode()
def _logits(options: QualityBench, name: QuantizationName | None, tokens: list[int]) -> Tensor:
    """Logits `[T, V]` of the model as `serve` runs it."""
    size = 16
    settings = ServeSettings(
        model=options.model,
        dtype=options.dtype,
        quantization=name,
        block_size=size,
        kv_cache_blocks=len(tokens) // size + 1,
    )
    runner = load_runner(settings, lambda: None).runner
    cache = PrefixCache(len(tokens) // size + 1, size, share=False)
    every = SamplingParams(1, prompt_logprobs=0)
    sequence = Sequence(Request("text", tokens, every, b"", frozenset()), 0)
    cache.admit(sequence.row, cache.plan(tokens, b""))
    return runner.run(BatchBuilder(cache).build([Chunk(sequence, 0, len(tokens))])).float()
