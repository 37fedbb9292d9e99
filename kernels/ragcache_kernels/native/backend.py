"""Attention in C, on CPUs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragcache_kernels.growth import TilePlanner
from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.layer_ops import Rotation
from ragcache_kernels.native import structs
from ragcache_kernels.native.layer_ops import NativeLayerOps, weight_dtype
from ragcache_kernels.native.library import Team
from ragcache_kernels.native.plan import NativePlan
from ragcache_kernels.native.structs import Pool, activation, dense, pointer
from ragcache_kernels.tiles import NARROW_SPLIT
from ragcache_kernels.torch_gather import Scratch

_ROWS = 60  # of a tile: what is converted is used often, and stays in the second cache
_LOG2E = 1 / math.log(2)
_CPU = torch.device("cpu")


class NativeBackend(AttentionBackend[NativePlan]):
    """Tiles of queries and keys, merged in the order of the keys. Not thread-safe.

    A sequence's result does not depend on the rest of the batch, as long as it shares no run of
    blocks, nor on how its prompt was cut into chunks, nor on the number of threads.
    """

    name = "native"

    def __init__(self, team: Team | None = None) -> None:
        self._team = team or Team()
        self.ops = NativeLayerOps(self._team)
        self._planner = TilePlanner(wide_parts=1)
        self._scratch = Scratch()

    def plan(self, layout: StepLayout, device: torch.device) -> NativePlan:
        """Do the step's host work once; all layers share the result."""
        return NativePlan(layout, self._planner)

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, plan: NativePlan) -> None:
        """Store key `[T, Hkv, D]` and value `[T, Hkv, Dv]` in their slots."""
        key, value = dense(key), dense(value)
        call = structs.Writing(
            keys=key.data_ptr(),
            values=value.data_ptr(),
            slots=plan.slots.data_ptr(),
            key=Pool.of(cache.key, cache.key_scale),
            value=Pool.of(cache.value, cache.value_scale),
            key_token=key.stride(0),
            key_head=key.stride(1),
            value_token=value.stride(0),
            value_head=value.stride(1),
            tokens=len(key),
            kv_heads=key.shape[1],
            block_size=plan.block_size,
            dtype=activation(key),
        )
        self._team.library.run_write_kv(self._team.handle, call)

    def rotate_and_write(
        self, qkv: Tensor, rotation: Rotation, cache: LayerCache, plan: NativePlan
    ) -> Tensor:
        """Rotate queries and keys of qkv `[T, Hq + 2·Hkv, D]`, and store the keys and values."""
        qkv, cos, sin = dense(qkv), rotation.cos, rotation.sin
        if not cos.dtype is sin.dtype is qkv.dtype or cos.stride() != sin.stride():
            raise TypeError(f"cosines in {cos.dtype} for {qkv.dtype}")
        tokens, every, dim = qkv.shape
        kv_heads = cache.key.shape[2]
        heads = every - 2 * kv_heads
        query = torch.empty(tokens, heads, dim, dtype=qkv.dtype)
        call = structs.Rotation(
            qkv=qkv.data_ptr(),
            query=query.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=plan.slots.data_ptr(),
            key=Pool.of(cache.key, cache.key_scale),
            value=Pool.of(cache.value, cache.value_scale),
            qkv_token=qkv.stride(0),
            qkv_head=qkv.stride(1),
            angles_token=cos.stride(0),
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            rotary=cos.shape[1],
            block_size=plan.block_size,
            dtype=activation(qkv),
        )
        if rotation.query_norm is not None and rotation.key_norm is not None:
            call.query_weight = rotation.query_norm.weight.data_ptr()
            call.key_weight = rotation.key_norm.weight.data_ptr()
            call.weight_dtype = weight_dtype(rotation.query_norm, qkv, dim)
            call.query_eps, call.key_eps = rotation.query_norm.eps, rotation.key_norm.eps
        self._team.library.run_rotate_and_write(self._team.handle, call)
        return query

    def attend(
        self, query: Tensor, cache: LayerCache, plan: NativePlan, spec: AttentionSpec
    ) -> Tensor:
        """Attention of query `[T, Hq, D]`, after `write_kv`: `[T, Hq, Dv]` in the query's dtype."""
        query = dense(query)
        tokens, heads, _ = query.shape
        kv_heads, value_dim = cache.value.shape[2:]
        queries = max(1, _ROWS * kv_heads // heads)
        work = plan.work(spec.window, queries)
        out = torch.empty(tokens, heads, value_dim, dtype=query.dtype)
        sinks = None if spec.sinks is None else spec.sinks.float() * _LOG2E
        partials = work.num_partials * heads
        sums = self._scratch.take("sums", (partials, value_dim), torch.float32, _CPU)
        tops, totals = self._scratch.take("weights", (2, partials), torch.float32, _CPU)
        call = structs.Attention(
            query=query.data_ptr(),
            out=out.data_ptr(),
            key=Pool.of(cache.key, cache.key_scale),
            value=Pool.of(cache.value, cache.value_scale),
            table=plan.table.data_ptr(),
            tiles=work.tiles.ctypes.data,
            tile_tokens=work.tokens.ctypes.data,
            positions=work.positions.ctypes.data,
            ends=work.ends.ctypes.data,
            order=work.order.ctypes.data,
            sinks=pointer(sinks),
            sums=sums.data_ptr(),
            tops=tops.data_ptr(),
            totals=totals.data_ptr(),
            query_token=query.stride(0),
            query_head=query.stride(1),
            table_row=plan.table.stride(0),
            tokens=tokens,
            num_tiles=len(work.tiles),
            heads=heads,
            kv_heads=kv_heads,
            block_size=plan.block_size,
            most_queries=work.most_queries,
            split=NARROW_SPLIT,
            window=spec.window or 0,
            dtype=activation(query),
            scale=spec.scale * _LOG2E,
            softcap=(spec.softcap or 0.0) * _LOG2E,
        )
        size = self._team.library.attention_scratch(call) * self._team.threads
        call.scratch = self._scratch.take("work", (size,), torch.float32, _CPU).data_ptr()
        self._team.library.run_attention(self._team.handle, call)
        return out
