"""A step's plan as the C kernels read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragcache_kernels.growth import TilePlanner
from ragcache_kernels.interface import StepLayout
from ragcache_kernels.tiles import Ints, Tiles


@dataclass(frozen=True, slots=True)
class Work:
    """`Tiles` of both kinds in one array."""

    tiles: Ints  # [n, 7]
    tokens: Ints
    positions: Ints
    ends: Ints
    order: Ints
    most_queries: int  # of a tile

    @classmethod
    def of(cls, tiles: Tiles) -> Work:
        """Narrow tiles first, as their partial results are numbered."""
        every = np.concatenate([tiles.narrow, tiles.wide])
        most = int(every[:, 1].max())
        return cls(every, tiles.tokens, tiles.positions, tiles.ends, tiles.order, most)

    @property
    def num_partials(self) -> int:
        """How many partial results there is room for."""
        return len(self.order)


class NativePlan:
    """A step's slots and block table, and its tiles by window and number of queries."""

    def __init__(self, layout: StepLayout, planner: TilePlanner) -> None:
        self.slots = layout.slot_mapping.contiguous()
        self.table = layout.block_table.contiguous()
        self.block_size = layout.block_size
        self._layout = layout
        self._planner = planner
        self._work: dict[tuple[int | None, int], Work] = {}
        self.steps: dict[Any, tuple[Any, list[Any]]] = {}  # see `NativeLayer`

    def of_last(self, rows: Tensor) -> NativePlan:
        """The plan for those queries only, of each sequence the last ones or none."""
        layout, cu_q = self._layout, self._layout.cu_q.numpy()
        counts = np.bincount(np.searchsorted(cu_q[1:], rows.numpy(), side="right"))
        sequences = np.flatnonzero(counts)
        ends = counts[sequences].cumsum(dtype=np.int32)
        some = StepLayout(
            cu_q=torch.from_numpy(np.concatenate([np.zeros(1, dtype=np.int32), ends])),
            kv_len=layout.kv_len[sequences],
            block_table=layout.block_table[sequences],
            slot_mapping=torch.full((len(rows),), -1),
            block_size=self.block_size,
        )
        return NativePlan(some, TilePlanner(exact=True))

    def work(self, window: int | None, queries: int) -> Work:
        """The tiles of at most `queries` queries for layers with this window."""
        key = window, queries
        if key not in self._work:
            self._work[key] = Work.of(self._planner.plan(self._layout, window, queries, queries))
        return self._work[key]
