"""A step's plan on the device: slots, block table and tiles, which arrive in one copy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache_kernels.growth import TilePlanner
from ragcache_kernels.interface import StepLayout
from ragcache_kernels.tiles import TILE_FIELDS, Tiles

Arrays = list[NDArray[np.int32]]


class Kind(NamedTuple):
    """What tiles depend on besides the step: layers of one kind share them."""

    window: int | None
    narrow_queries: int  # most queries of a tile
    wide_queries: int


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """`Tiles` on the device: narrow and wide ones `[n · 7]`, and how many in `[1]` each."""

    narrow: Tensor
    num_narrow: Tensor
    wide: Tensor
    num_wide: Tensor
    tokens: Tensor
    positions: Tensor
    ends: Tensor
    order: Tensor

    @property
    def num_partials(self) -> int:
        """How many partial results there is room for."""
        return len(self.order)


class Upload:
    """Arrays of int32 that reach the device in one copy, at places that never change.

    Each starts at a multiple of 16 bytes: kernels are compiled anew for other alignments.
    """

    def __init__(self, sizes: Iterable[int], device: torch.device) -> None:
        sizes = list(sizes)
        self._starts = np.cumsum([0, *(size + -size % 4 for size in sizes)]).tolist()
        total, cuda = self._starts[-1], device.type == "cuda"
        # Zeros: what a step leaves unused must be harmless too.
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros_like(self._host, device=device) if cuda else self._host
        self._sent = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        places = zip(self._starts, sizes, strict=False)
        self.views = [self._device[start : start + size] for start, size in places]

    def send(self, arrays: Arrays) -> bool:
        """Copy the arrays to the first elements of their places; False where one is too long."""
        if any(array.size > len(view) for array, view in zip(arrays, self.views, strict=True)):
            return False
        if self._sent is not None:
            self._sent.synchronize()  # the last copy may still be reading
        host = self._host.numpy()
        for start, array in zip(self._starts, arrays, strict=False):
            host[start : start + array.size] = array.ravel()
        if self._sent is not None:
            used = self._starts[len(arrays) - 1] + arrays[-1].size
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._sent.record()
        return True


class TritonPlan:
    """A step's slots `[T]` and block table (flat, row after row) on the device, and its tiles.

    `kinds` are those of the layers that are known to come; others get their tiles when they do.
    """

    def __init__(
        self,
        layout: StepLayout,
        device: torch.device,
        planner: TilePlanner,
        kinds: Collection[Kind],
    ) -> None:
        self.block_size = layout.block_size
        self.recorded = False
        self._layout = layout
        self._device = device
        self._planner = planner
        arrays = _arrays(layout, planner, kinds)
        upload = Upload((array.size for array in arrays), device)
        upload.send(arrays)
        self.slots, self._tiles, self.table = _views(upload, kinds)

    def tiles(self, kind: Kind) -> DeviceTiles:
        """The work of the layers of one kind."""
        if kind not in self._tiles:
            arrays = _tile_arrays(self._planner.plan(self._layout, *kind), self._layout)
            upload = Upload((array.size for array in arrays), self._device)
            upload.send(arrays)
            self._tiles[kind] = DeviceTiles(*upload.views)
        return self._tiles[kind]


class TritonFixedPlan:
    """A plan whose tensors stay where they are, so that launches which read it can be recorded.

    It is for `tokens` sequences that decode, cut into up to `parts` tiles, whose rows of the block
    table have up to `table` entries together.
    """

    def __init__(
        self,
        tokens: int,
        parts: int,
        table: int,
        block_size: int,
        device: torch.device,
        planner: TilePlanner,
        kinds: Collection[Kind],
    ) -> None:
        self.block_size = block_size
        self.recorded = True
        self._planner = planner
        self._kinds = kinds
        rows = TILE_FIELDS * parts
        tiles = [rows, 1, rows, 1, 4 * tokens, tokens, tokens + 1, parts]
        self._upload = Upload([tokens, *tiles * len(kinds), table], device)
        self.slots, self._tiles, self.table = _views(self._upload, kinds)

    def update(self, layout: StepLayout) -> bool:
        """Make it the plan of `layout`; False, and no change, where that does not fit."""
        return self._upload.send(_arrays(layout, self._planner, self._kinds))

    def tiles(self, kind: Kind) -> DeviceTiles:
        """The work of the layers of one kind; raises KeyError for one that was not announced."""
        return self._tiles[kind]


def _arrays(layout: StepLayout, planner: TilePlanner, kinds: Collection[Kind]) -> Arrays:
    """Slots, tiles by kind, and last the table, which in a fixed plan is mostly unused."""
    arrays = [layout.slot_mapping.numpy()]
    for kind in kinds:
        arrays += _tile_arrays(planner.plan(layout, *kind), layout)
    return [*arrays, layout.block_table.numpy()]


def _tile_arrays(tiles: Tiles, layout: StepLayout) -> Arrays:
    """In the order of `DeviceTiles`; tiles have the start of a sequence's row in its place."""
    arrays: Arrays = []
    for kind in (tiles.narrow, tiles.wide):
        located = kind.copy()
        located[:, 2] *= layout.block_table.shape[1]
        arrays += [located, np.array([len(kind)], dtype=np.int32)]
    return [*arrays, tiles.tokens, tiles.positions, tiles.ends, tiles.order]


def _views(
    upload: Upload, kinds: Collection[Kind]
) -> tuple[Tensor, dict[Kind, DeviceTiles], Tensor]:
    slots, *tiles, table = upload.views
    each = len(DeviceTiles.__dataclass_fields__)
    parts = (tiles[each * i : each * (i + 1)] for i in range(len(kinds)))
    return slots, {k: DeviceTiles(*part) for k, part in zip(kinds, parts, strict=True)}, table
