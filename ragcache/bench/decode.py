"""A decode step of a random model against the time in which its weights can be read."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ragcache.bench.chunks import admitted
from ragcache.config import ServeSettings
from ragcache.engine.assembly import build_runner
from ragcache.engine.batch import BatchBuilder
from ragcache.prefix.cache import PrefixCache

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
WARM_UP = 3  # steps: before layers have run no plan can be fixed, and then it is recorded


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
    """Seconds of a step on the host's clock, from a batch to its tokens: the median of rounds."""
    with device:
        config = AutoConfig.for_model("llama", **shape)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    weights = _weights(model)
    settings = ServeSettings(kv_cache_blocks=batch * (context // 16 + 1), max_running=batch)
    runner, num_blocks = build_runner(model, settings)
    cache = PrefixCache(num_blocks, settings.block_size, share=False)
    chunks = admitted(cache, batch, context, 1)
    batches = BatchBuilder(cache)
    times = []
    for _ in range(WARM_UP + rounds):
        started = perf_counter()
        runner.run(batches.build(chunks)).argmax(dim=-1).tolist()
        times.append(perf_counter() - started)
    return {
        "key": "decode step",
        "name": f"step of {weights / 1e9:.1f} GB weights, decode {batch} over {context}",
        "seconds": median(times[WARM_UP:]),
        "memory_seconds": weights / bytes_per_second,
        "compute_seconds": 0.0,
    }


def _weights(model: PreTrainedModel) -> int:
    """Bytes that every step reads: of a table of embeddings it reads some rows only."""
    table = model.get_input_embeddings().weight
    parameters = [each for each in model.parameters() if each is not table]
    if model.config.tie_word_embeddings:
        parameters.append(table)
    return sum(each.numel() * each.itemsize for each in parameters)
