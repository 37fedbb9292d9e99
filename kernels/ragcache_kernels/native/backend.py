"""Attention in C, on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from ragcache_kernels.growth import TilePlanner
from ragcache_kernels.interface import (
    AttentionBackend,
    AttentionSpec,
    LayerCache,
    LayerParts,
    StepLayout,
)
from ragcache_kernels.layer_ops import Rotation
from ragcache_kernels.native import structs
from ragcache_kernels.native.attention import AttentionCalls, Logits
from ragcache_kernels.native.layer import NativeLayer, Stack
from ragcache_kernels.native.layer_ops import NativeLayerOps
from ragcache_kernels.native.library import Team
from ragcache_kernels.native.linear import PackedLinear
from ragcache_kernels.native.pairing import Pairing
from ragcache_kernels.native.plan import NativePlan
from ragcache_kernels.native.structs import Pool, activation, dense, weight_dtype

LEAST_SKIPPED = 64  # rows: the last layer without them is planned by itself, which takes time


class NativeBackend(AttentionBackend[NativePlan]):
    """Tiles of queries and keys, merged in the order of the keys. Not thread-safe.

    A sequence's result does not depend on the rest of the batch, nor on the blocks that it shares,
    nor on how its prompt was cut into chunks, nor on the number of threads.
    """

    name = "native"

    def __init__(self, team: Team | None = None, *, quantised: bool = False) -> None:
        """With int8 weights, if `quantised`."""
        self._team = team or Team()
        self.ops = NativeLayerOps(self._team, quantised=quantised)
        self._planner = TilePlanner(exact=True)
        self._calls = AttentionCalls(self._team)

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
            call.weight_dtype = weight_dtype(rotation.query_norm, qkv.dtype, dim)
            call.query_eps, call.key_eps = rotation.query_norm.eps, rotation.key_norm.eps
        self._team.library.run_rotate_and_write(self._team.handle, call)
        return query

    def attend(
        self, query: Tensor, cache: LayerCache, plan: NativePlan, spec: AttentionSpec
    ) -> Tensor:
        """Attention of query `[T, Hq, D]`, after `write_kv`: `[T, Hq, Dv]` in the query's dtype."""
        query = dense(query)
        heads = query.shape[1]
        out = torch.empty(len(query), heads, cache.value.shape[3], dtype=query.dtype)
        call, _memory = self._calls.build(heads, cache, plan, spec.window, query.dtype)
        logits = Logits(spec)
        logits.put_into(call)
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.query_token, call.query_head = query.stride()[:2]
        self._team.library.run_attention(self._team.handle, call)
        return out

    def laid_out(self, cache: LayerCache, dtype: torch.dtype) -> LayerCache:
        """See `AttentionBackend`."""
        return Pairing(self._team, dtype).pair(cache)

    def in_order(self, cache: LayerCache, dtype: torch.dtype) -> LayerCache:
        """See `AttentionBackend`."""
        return Pairing(self._team, dtype).unpair(cache)

    def whole_layer(self, parts: LayerParts) -> NativeLayer | None:
        """The layer as one call, if all its products are packed."""
        products = (parts.qkv, parts.out, parts.gated, parts.down)
        if not all(isinstance(each, PackedLinear) for each in products):
            return None
        return NativeLayer(self._calls, parts)

    def run_layers(
        self,
        layers: Sequence[NativeLayer],
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        caches: Sequence[LayerCache],
        plan: NativePlan,
        keep: Tensor | None = None,
    ) -> Tensor:
        """All of them as one call; see `AttentionBackend`, and `NativeLayer.step` for errors."""
        hidden, output = dense(hidden), torch.empty_like(hidden)
        rotary = angles[0].shape[1]
        pairs = list(zip(layers, caches, strict=True))
        calls = [layer.bind(cache, rotary) for layer, cache in pairs]
        steps = [layer.step(hidden, angles, cache, plan) for layer, cache in pairs]
        stack = Stack.of(calls, steps, hidden, output)
        skips = keep is not None and len(hidden) - len(keep) >= LEAST_SKIPPED
        if keep is not None and skips:
            stack.kept, stack.num_kept = keep.data_ptr(), len(keep)
            some = plan.of_last(keep) if len(keep) else plan
            stack.last = layers[-1].step(hidden, angles, caches[-1], some)
        self._team.library.run_layers(self._team.handle, byref(stack))
        if keep is None:
            return output
        return output[: len(keep)] if skips else output[keep]
