"""A model without weights, for measuring and testing everything around the model.

Its "KV" of a token is the token id itself, kept slot by slot in a real pool, and its logits are
a pseudo-random function of the ids that a sequence reads back through its block table. A wrong
slot, a stale block or a lost copy therefore changes its answers, exactly as in a real model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from ragcache_kernels.interface import StepLayout
from torch import Tensor

from ragcache.engine.batch import StepBatch
from ragcache.engine.runner import nothing


class HashRunner:
    """Implements `engine.runner.Runner` over `num_blocks` blocks of token ids.

    It can swap them to `host_blocks` more.
    """

    exact = True

    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int, host_blocks: int = 0
    ) -> None:
        self._slots: NDArray[np.int64] = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self._host: NDArray[np.int64] = np.full((host_blocks, block_size), -1, dtype=np.int64)
        self._vocab_size = vocab_size

    def run(self, batch: StepBatch, meanwhile: Callable[[], None] = nothing) -> Tensor:
        """Logits `[S', V]` of the rows in `batch.last_idx`."""
        meanwhile()
        for source, target in batch.swap_outs:
            self._host[target] = self._slots[source]
        for source, target in batch.swap_ins:
            self._slots[target] = self._host[source]
        for source, target in batch.copies:
            self._slots[target] = self._slots[source]
        layout = batch.layout
        self._slots.reshape(-1)[layout.slot_mapping.numpy()] = batch.input_ids[0].numpy()
        rows = [self._context(layout, row) for row in batch.last_idx.tolist()]
        return torch.stack([self.logits(row) for row in rows]) if rows else torch.empty(0, 1)

    def prepare(self, layout: StepLayout) -> None:
        """See `Runner`; there is nothing to plan."""

    def close(self) -> None:
        """See `Runner`; there is nothing."""

    def logits(self, context: NDArray[np.int64]) -> Tensor:
        """Logits `[V]` after the token ids in `context`."""
        seed = zlib.crc32(context.astype(np.int64).tobytes())
        values = np.random.default_rng(seed).standard_normal(self._vocab_size, dtype=np.float32)
        return torch.from_numpy(values)

    def _context(self, layout: StepLayout, row: int) -> NDArray[np.int64]:
        sequence = int((layout.cu_q <= row).sum()) - 1
        behind = int(layout.cu_q[sequence + 1]) - 1 - row
        length = int(layout.kv_len[sequence]) - behind
        blocks = -(-length // layout.block_size)
        table = layout.block_table[sequence, :blocks].numpy()
        context: NDArray[np.int64] = self._slots[table].reshape(-1)[:length]
        return context
