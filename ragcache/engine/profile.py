"""How much memory a step takes beside weights and pool: the largest one is run to find out."""

from __future__ import annotations

import torch
from ragcache_kernels.interface import StepLayout

from ragcache.engine.batch import StepBatch
from ragcache.engine.draw import draw_widest
from ragcache.engine.runner import ModelRunner
from ragcache.engine.scheduler import MAX_LOGITS


def largest_step(
    max_batch_tokens: int, max_running: int, max_kv_len: int, block_size: int
) -> StepBatch:
    """A chunk that uses the whole budget, at the end of the longest context, with most logits.

    Every block of its context is block 0, and it writes nowhere: a pool of one block will do.
    """
    tokens = min(max_batch_tokens, max_kv_len)
    rows = min(tokens, max(MAX_LOGITS, max_running))
    return StepBatch(
        input_ids=torch.zeros(1, tokens, dtype=torch.int64),
        position_ids=torch.arange(max_kv_len - tokens, max_kv_len)[None],
        last_idx=torch.arange(tokens - rows, tokens),
        layout=StepLayout(
            cu_q=torch.tensor([0, tokens], dtype=torch.int32),
            kv_len=torch.tensor([max_kv_len], dtype=torch.int32),
            block_table=torch.zeros(1, -(-max_kv_len // block_size), dtype=torch.int32),
            slot_mapping=torch.full((tokens,), -1),
            block_size=block_size,
        ),
        swap_outs=[],
        swap_ins=[],
        copies=[],
    )


@torch.inference_mode()
def step_memory(
    runner: ModelRunner, batch: StepBatch, max_running: int, device: torch.device
) -> int:
    """Bytes that a GPU must have free to run the largest steps and to sample from their logits.

    `runner` has a pool of one block; `max_running` sequences are sampled from at once.
    """
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits = runner.rehearse(batch)
    draw_widest(logits[:max_running])
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()  # the pool is to have it
    return peak
