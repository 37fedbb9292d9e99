"""Pools as the C kernels keep them in bfloat16; see `is_paired` in src/pool.h."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ragcache_kernels.interface import LayerCache
from ragcache_kernels.native.library import Team
from ragcache_kernels.native.structs import ACTIVATIONS, Pool

LANES = 16  # slots of a group


class Pairing:
    """Copies of caches with rows as they are kept, for activations in `dtype`, and back."""

    def __init__(self, team: Team, dtype: torch.dtype) -> None:
        self._library = team.library
        self._dtype = dtype

    def pair(self, cache: LayerCache) -> LayerCache:
        """From rows in the order of the shape."""
        key, value = cache.key, cache.value
        blocks, size, heads, _ = key.shape
        if self._is_paired(key, cache.key_scale):
            groups = key.view(blocks, size // LANES, LANES, heads, -1, 2)
            key = groups.permute(0, 3, 1, 4, 2, 5).reshape(key.shape)
        if self._is_paired(value, cache.value_scale):
            groups = value.view(blocks, size // LANES, LANES // 2, 2, heads, -1)
            value = groups.permute(0, 4, 1, 2, 5, 3).reshape(value.shape)
        return replace(cache, key=key, value=value)

    def unpair(self, cache: LayerCache) -> LayerCache:
        """To rows in the order of the shape."""
        key, value = cache.key, cache.value
        blocks, size, heads, _ = key.shape
        if self._is_paired(key, cache.key_scale):
            groups = key.reshape(blocks, heads, size // LANES, -1, LANES, 2)
            key = groups.permute(0, 2, 4, 1, 3, 5).reshape(key.shape)
        if self._is_paired(value, cache.value_scale):
            groups = value.reshape(blocks, heads, size // LANES, LANES // 2, -1, 2)
            value = groups.permute(0, 2, 3, 5, 1, 4).reshape(value.shape)
        return replace(cache, key=key, value=value)

    def _is_paired(self, rows: Tensor, scales: Tensor | None) -> bool:
        pool, (_, size, heads, _) = Pool.of(rows, scales), rows.shape
        dtype = ACTIVATIONS[self._dtype]
        return bool(self._library.pool_is_paired(pool, heads, size, dtype))
