"""Whole blocks between the caches of all layers and one staging buffer, in one launch each way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ragcache_kernels.transfer import upload

CHUNK = 1024  # elements of a program


@triton.jit(do_not_specialize=["layers"])
def move_blocks(
    caches_ptr,
    ids_ptr,
    staging_ptr,
    layers,
    elements,
    GATHER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (i, c, l): chunk c of block `ids[i]` of cache l; `staging` is `[n, L, elements]`."""
    block = tl.program_id(0)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    layer = tl.program_id(2).to(tl.int64)
    cache = tl.load(caches_ptr + layer).to(staging_ptr.dtype)
    cache = cache + tl.load(ids_ptr + block) * elements + at
    staging = staging_ptr + (block * layers + layer) * elements + at
    inside = at < elements
    if GATHER:
        tl.store(staging, tl.load(cache, mask=inside), mask=inside)
    else:
        tl.store(cache, tl.load(staging, mask=inside), mask=inside)


def copy_blocks(caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block src to block dst in every cache; all sources are read before any write.

    Caches `[N, ...]` are contiguous, and may differ in shape: those whose blocks are of one size
    move together.
    """
    by_size: dict[int, list[Tensor]] = {}
    for cache in caches:
        by_size.setdefault(cache[0].nbytes, []).append(cache)
    sources, targets = zip(*pairs, strict=True)
    for group in by_size.values():
        staging = empty_staging(group, len(pairs))
        gather_blocks(group, sources, staging)
        scatter_blocks(group, targets, staging)


def empty_staging(caches: Sequence[Tensor], count: int) -> Tensor:
    """Room for `count` blocks of L caches with blocks of one size: `[count, L, elements]`.

    The elements are the widest integers that a block consists of.
    """
    unit = _unit(caches[0])
    shape = (count, len(caches), caches[0][0].nbytes // unit.itemsize)
    return torch.empty(shape, dtype=unit, device=caches[0].device)


def gather_blocks(caches: Sequence[Tensor], ids: Sequence[int], staging: Tensor) -> None:
    """Copy blocks `ids` of the caches into as much `staging` (see `empty_staging`)."""
    _launch(caches, ids, staging, gather=True)


def scatter_blocks(caches: Sequence[Tensor], ids: Sequence[int], staging: Tensor) -> None:
    """Copy what `gather_blocks` put into `staging` into blocks `ids` of the caches."""
    _launch(caches, ids, staging, gather=False)


def _launch(caches: Sequence[Tensor], ids: Sequence[int], staging: Tensor, *, gather: bool) -> None:
    count, layers, elements = staging.shape
    move_blocks[(count, triton.cdiv(elements, CHUNK), layers)](
        _on_device(tuple(cache.data_ptr() for cache in caches), staging.device),
        upload(np.array(ids, dtype=np.int64), staging.device),
        staging,
        layers,
        elements,
        GATHER=gather,
        CHUNK=CHUNK,
    )


@lru_cache(maxsize=16)
def _on_device(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """A pool stays where it is, so its addresses are sent once."""
    return torch.tensor(pointers, dtype=torch.int64, device=device)


def _unit(cache: Tensor) -> torch.dtype:
    """The widest integer that a block consists of."""
    units = (torch.int64, torch.int32, torch.int16, torch.int8)
    return next(unit for unit in units if cache[0].nbytes % unit.itemsize == 0)
