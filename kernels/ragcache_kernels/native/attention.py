"""The arguments of the attention kernel; see src/attention.h."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragcache_kernels.interface import AttentionSpec, LayerCache
from ragcache_kernels.native import structs
from ragcache_kernels.native.library import Team
from ragcache_kernels.native.plan import NativePlan
from ragcache_kernels.native.structs import Pool, pointer
from ragcache_kernels.tiles import NARROW_SPLIT
from ragcache_kernels.torch_gather import Scratch

_ROWS = 60  # of a tile: what is converted is used often, and stays in the second cache
_LOG2E = 1 / math.log(2)
_CPU = torch.device("cpu")


class Logits:
    """What makes logits of products, in base 2."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale = spec.scale * _LOG2E
        self._softcap = (spec.softcap or 0.0) * _LOG2E
        self._sinks = None if spec.sinks is None else spec.sinks.float() * _LOG2E

    def put_into(self, call: structs.Attention) -> None:
        """The call is good as long as this object is there."""
        call.scale, call.softcap = self._scale, self._softcap
        call.sinks = pointer(self._sinks)


class AttentionCalls:
    """Calls for the layers of a step; all have the same memory for partial results."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self.scratch = Scratch()

    def build(
        self,
        heads: int,
        cache: LayerCache,
        plan: NativePlan,
        window: int | None,
        dtype: torch.dtype,
    ) -> tuple[structs.Attention, list[Tensor]]:
        """A call up to what it reads and writes, and `Logits`; `dtype` is that of the queries.

        It is good as long as the memory that comes with it is kept: the next one may take other.
        """
        kv_heads, value_dim = cache.value.shape[2:]
        work = plan.work(window, max(1, _ROWS * kv_heads // heads))
        partials = work.num_partials * heads
        sums = self._floats("sums", partials * value_dim)
        tops, totals = self._floats("tops", partials), self._floats("totals", partials)
        call = structs.Attention(
            key=Pool.of(cache.key, cache.key_scale),
            value=Pool.of(cache.value, cache.value_scale),
            table=plan.table.data_ptr(),
            tiles=work.tiles.ctypes.data,
            tile_tokens=work.tokens.ctypes.data,
            positions=work.positions.ctypes.data,
            ends=work.ends.ctypes.data,
            order=work.order.ctypes.data,
            sums=sums.data_ptr(),
            tops=tops.data_ptr(),
            totals=totals.data_ptr(),
            table_row=plan.table.stride(0),
            tokens=len(work.positions),
            num_tiles=len(work.tiles),
            heads=heads,
            kv_heads=kv_heads,
            block_size=plan.block_size,
            most_queries=work.most_queries,
            split=NARROW_SPLIT,
            window=window or 0,
            dtype=structs.ACTIVATIONS[dtype],
        )
        size = self._team.library.attention_scratch(call) * self._team.threads
        scratch = self._floats("work", size)
        call.scratch = scratch.data_ptr()
        return call, [sums, tops, totals, scratch]

    def _floats(self, name: str, count: int) -> Tensor:
        return self.scratch.take(name, (count,), torch.float32, _CPU)
