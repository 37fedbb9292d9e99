"""The tensors of one step, packed without padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from ragcache_kernels.interface import StepLayout
from ragcache_kernels.ranges import ranges
from torch import Tensor

from ragcache.engine.request import Chunk
from ragcache.prefix.cache import PrefixCache

Tables = list[list[int]]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over T tokens of S sequences.

    `input_ids`, `position_ids`: `[1, T]` int64. `last_idx`: `[S']` int64, the rows whose logits
    are wanted, the last `num_logits` of each chunk. Before the pass blocks are moved, in this
    order: `swap_outs` (device to host) and `swap_ins` (host to device), pairs of source and
    target, and `copies` within the device. All on the host.
    """

    input_ids: Tensor
    position_ids: Tensor
    last_idx: Tensor
    layout: StepLayout
    swap_outs: list[tuple[int, int]]
    swap_ins: list[tuple[int, int]]
    copies: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Known:
    """Block tables as they were when they were put into a matrix, and how long they were."""

    tables: Tables
    lengths: list[int]
    matrix: NDArray[np.int32]


class BatchBuilder:
    """Builds steps; a decoding batch's next step is prepared while the device runs this one."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._known: _Known | None = None

    def build(self, chunks: list[Chunk]) -> StepBatch:
        """Pack the chunks of a step; their rows must cover the tokens that are run."""
        size = self._cache.block_size
        starts, counts, logits = np.array([(c.start, c.count, c.num_logits) for c in chunks]).T
        ends = counts.cumsum()
        table = self._matrix([self._cache.table(chunk.sequence.row) for chunk in chunks])
        positions = ranges(starts, counts)
        blocks = table[np.repeat(np.arange(len(chunks)), counts), positions // size]
        swap_outs, swap_ins = self._cache.take_swaps()
        return StepBatch(
            input_ids=torch.tensor([[t for c in chunks for t in c.tokens]], dtype=torch.int64),
            position_ids=torch.from_numpy(positions)[None],
            last_idx=torch.from_numpy(ranges(ends - logits, logits)),
            layout=StepLayout(
                cu_q=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
                kv_len=torch.from_numpy((starts + counts).astype(np.int32)),
                block_table=torch.from_numpy(table),
                slot_mapping=torch.from_numpy(blocks.astype(np.int64) * size + positions % size),
                block_size=size,
            ),
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            copies=self._cache.take_copies(),
        )

    def prepare(self, chunks: list[Chunk]) -> StepLayout | None:
        """The layout of the next step if the chunks of this one, committed by now, all decode on.

        None if they are not all decodes. Slots, and the blocks that the next tokens may take, are
        left open.
        """
        if not all(chunk.count == chunk.num_logits == 1 for chunk in chunks):
            return None
        tables = [self._cache.table(chunk.sequence.row) for chunk in chunks]
        matrix = _padded(tables)
        self._known = _Known(tables, [len(table) for table in tables], matrix)
        return StepLayout(
            cu_q=torch.arange(len(chunks) + 1, dtype=torch.int32),
            kv_len=torch.tensor([chunk.start + 2 for chunk in chunks], dtype=torch.int32),
            block_table=torch.from_numpy(matrix),
            slot_mapping=torch.full((len(chunks),), -1),
            block_size=self._cache.block_size,
        )

    def _matrix(self, tables: Tables) -> NDArray[np.int32]:
        """Tables `[S, maxB]`, padded with 0.

        Between a commit and the next step a row only grows, but for a last block that it shares.
        """
        known, self._known = self._known, None
        if known is None or len(tables) != len(known.tables):
            return _padded(tables)
        if any(now is not then for now, then in zip(tables, known.tables, strict=True)):
            return _padded(tables)
        missing = max(map(len, tables)) - known.matrix.shape[1]
        matrix = np.pad(known.matrix, ((0, 0), (0, max(0, missing))))
        for row, table, length in zip(matrix, tables, known.lengths, strict=True):
            row[length - 1 : len(table)] = table[length - 1 :]
        return matrix


def _padded(tables: Tables) -> NDArray[np.int32]:
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
