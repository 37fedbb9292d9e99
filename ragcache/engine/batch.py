"""The tensors of one step, packed without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from ragcache_kernels.interface import StepLayout
from torch import Tensor

from ragcache.engine.request import Chunk
from ragcache.prefix.cache import PrefixCache

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over T tokens of S sequences.

    `input_ids`, `position_ids`: `[1, T]` int64. `last_idx`: `[S']` int64, the rows whose logits
    are wanted, the last `num_logits` of each chunk. `copies`: block pairs to copy before the
    pass. All on the host.
    """

    input_ids: Tensor
    position_ids: Tensor
    last_idx: Tensor
    layout: StepLayout
    copies: list[tuple[int, int]]


def build_batch(chunks: list[Chunk], cache: PrefixCache) -> StepBatch:
    """Pack the chunks of a step; their rows must cover the tokens that are run."""
    spans = [(c.sequence, c.start, c.count) for c in chunks]
    tables = [np.asarray(cache.table(s.row), dtype=np.int64) for s, _, _ in spans]
    positions = [np.arange(start, start + count) for _, start, count in spans]
    slots = [_slots(t, p, cache.block_size) for t, p in zip(tables, positions, strict=True)]
    tokens = [s.tokens[start : start + count] for s, start, count in spans]
    cu_q = np.cumsum([0, *(count for _, _, count in spans)])
    layout = StepLayout(
        cu_q=torch.from_numpy(cu_q.astype(np.int32)),
        kv_len=torch.tensor([start + count for _, start, count in spans], dtype=torch.int32),
        block_table=_padded(tables),
        slot_mapping=torch.from_numpy(np.concatenate(slots)),
        block_size=cache.block_size,
    )
    ends = zip(chunks, cu_q[1:], strict=True)
    wanted = [np.arange(stop - chunk.num_logits, stop) for chunk, stop in ends]
    return StepBatch(
        input_ids=torch.tensor([[t for chunk in tokens for t in chunk]], dtype=torch.int64),
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        last_idx=torch.from_numpy(np.concatenate(wanted)),
        layout=layout,
        copies=cache.take_copies(),
    )


def _slots(table: Slots, positions: Slots, block_size: int) -> Slots:
    return table[positions // block_size] * block_size + positions % block_size


def _padded(tables: list[Slots]) -> Tensor:
    padded = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(padded)
