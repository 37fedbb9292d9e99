"""Whole decoder layers as one call; see src/layer.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p, pointer
from typing import cast

import torch
from torch import Tensor

from ragcache_kernels.interface import LayerCache, LayerParts
from ragcache_kernels.layer_ops import Norm
from ragcache_kernels.native import structs
from ragcache_kernels.native.attention import AttentionCalls, Logits
from ragcache_kernels.native.library import Team
from ragcache_kernels.native.linear import ADD, LinearCall, PackedLinear
from ragcache_kernels.native.plan import LayerQueue, NativePlan
from ragcache_kernels.native.structs import ACTIVATIONS, Pool, dense, weight_dtype

_CPU = torch.device("cpu")


class LayerCall(Structure):
    """`struct layer`."""

    _fields_ = (
        ("input_norm", structs.Norm),
        ("mlp_norm", structs.Norm),
        ("attention_norm", structs.Norm),
        ("update_norm", structs.Norm),
        ("qkv", LinearCall),
        ("out", LinearCall),
        ("gated", LinearCall),
        ("down", LinearCall),
        ("rotation", structs.Rotation),
        ("attention", structs.Attention),
    )


class StepCall(Structure):
    """`struct step`."""

    _fields_ = (
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("query", c_void_p),
        ("attended", c_void_p),
        ("gated", c_void_p),
        ("update", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("angles_token", c_int64),
        ("slots", c_void_p),
        ("work", structs.Attention),
    )


class Stack(Structure):
    """`struct stack`."""

    _fields_ = (
        ("layers", POINTER(POINTER(LayerCall))),
        ("steps", POINTER(POINTER(StepCall))),
        ("input", c_void_p),
        ("output", c_void_p),
        ("count", c_int64),
    )

    @classmethod
    def of(cls, queue: LayerQueue) -> Stack:
        """The layers that wait."""
        layers, steps = zip(*queue.calls, strict=True)
        count = len(layers)
        return cls(
            layers=(POINTER(LayerCall) * count)(*map(pointer, layers)),
            steps=(POINTER(StepCall) * count)(*map(pointer, steps)),
            input=queue.input.data_ptr(),
            output=queue.output.data_ptr(),
            count=count,
        )


class NativeLayer:
    """A layer whose arguments are put together once, and for each step what is new in it."""

    def __init__(self, team: Team, calls: AttentionCalls, parts: LayerParts) -> None:
        self._team = team
        self._calls = calls
        self._parts = parts
        qkv, out, gated, down = (
            cast(PackedLinear, each) for each in (parts.qkv, parts.out, parts.gated, parts.down)
        )
        self._dtype = qkv.dtype
        self._size, self._gated_size = qkv.size_in, gated.size_out
        self._dim = qkv.size_out // (parts.heads + 2 * parts.kv_heads)
        self._logits = Logits(parts.spec)
        self._cache: LayerCache | None = None
        self._call = LayerCall(
            input_norm=self._norm(parts.input_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            qkv=self._linear(qkv),
            out=self._linear(out),
            gated=self._linear(gated),
            down=self._linear(down),
            rotation=self._rotation(),
        )
        if parts.update_norms is None:
            self._call.down.epilogue = ADD
        else:
            self._call.attention_norm, self._call.update_norm = map(self._norm, parts.update_norms)

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        plan: NativePlan,
        *,
        more: bool = False,
    ) -> Tensor:
        """See `WholeLayer`; raises TypeError for a hidden state that is not the weights' kind."""
        if hidden.dtype is not self._dtype or hidden.shape[1] != self._size:
            raise TypeError(f"{hidden.dtype} {list(hidden.shape)} for a layer in {self._dtype}")
        self._bind(cache, cos.shape[1])
        queue = plan.queue = plan.queue or LayerQueue(dense(hidden), torch.empty_like(hidden))
        queue.calls.append((self._call, self._step(len(hidden), cos, sin, cache, plan)))
        if not more:
            plan.queue = None
            self._team.library.run_layers(self._team.handle, byref(Stack.of(queue)))
        return queue.output

    def _bind(self, cache: LayerCache, rotary: int) -> None:
        """The pools stay where they are from step to step."""
        if cache is self._cache:
            return
        self._cache = cache
        attention, rotation = self._call.attention, self._call.rotation
        attention.key = rotation.key = Pool.of(cache.key, cache.key_scale)
        attention.value = rotation.value = Pool.of(cache.value, cache.value_scale)
        rotation.block_size = cache.key.shape[1]
        rotation.rotary = rotary if self._parts.rotates else 0
        self._logits.put_into(attention)

    def _step(
        self, tokens: int, cos: Tensor, sin: Tensor, cache: LayerCache, plan: NativePlan
    ) -> StepCall:
        """What this layer and others like it are given in this step."""
        parts, dim, window = self._parts, self._dim, self._parts.spec.window
        kind = (cos.data_ptr(), window, parts.heads, parts.kv_heads, dim, self._gated_size)
        if kind not in plan.steps:
            if not cos.dtype is sin.dtype is self._dtype or cos.stride() != sin.stride():
                raise TypeError(f"cosines in {cos.dtype} for {self._dtype}")
            attended = parts.heads * dim
            sizes = {
                "normed": self._size,
                "qkv": attended + 2 * parts.kv_heads * dim,
                "query": attended,
                "attended": attended,
                "gated": self._gated_size,
                "update": self._size,
            }
            take = self._calls.scratch.take
            between = {
                name: take(name, (tokens, size), self._dtype, _CPU) for name, size in sizes.items()
            }
            work = self._calls.build(parts.heads, cache, plan, window, self._dtype)
            work.query_token, work.query_head = attended, dim
            pointers = {name: tensor.data_ptr() for name, tensor in between.items()}
            step = StepCall(
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                angles_token=cos.stride(0),
                slots=plan.slots.data_ptr(),
                work=work,
                **pointers,
            )
            plan.steps[kind] = step, [cos, sin, *between.values()]  # which live as long
        step, _ = plan.steps[kind]
        return cast(StepCall, step)

    def _norm(self, norm: Norm) -> structs.Norm:
        return structs.Norm(
            weight=norm.weight.data_ptr(),
            size=self._size,
            dtype=ACTIVATIONS[self._dtype],
            weight_dtype=weight_dtype(norm, self._dtype, self._size),
            eps=norm.eps,
        )

    def _linear(self, linear: PackedLinear) -> LinearCall:
        return LinearCall(
            weight=pointer(linear.packed),
            input_stride=linear.size_in,
            output_stride=linear.size_out,
            dtype=ACTIVATIONS[self._dtype],
            epilogue=linear.epilogue,
        )

    def _rotation(self) -> structs.Rotation:
        parts, dim = self._parts, self._dim
        heads = parts.heads + 2 * parts.kv_heads
        call = structs.Rotation(
            qkv_token=heads * dim,
            qkv_head=dim,
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            dtype=ACTIVATIONS[self._dtype],
        )
        if parts.head_norms is not None:
            query, key = parts.head_norms
            call.query_weight, call.key_weight = query.weight.data_ptr(), key.weight.data_ptr()
            call.weight_dtype = weight_dtype(query, self._dtype, dim)
            call.query_eps, call.key_eps = query.eps, key.eps
        return call
