"""Whole decoder layers as one call; see src/layer.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_int64, c_void_p, pointer
from typing import Any, cast

import torch
from torch import Tensor

from ragcache_kernels.interface import LayerCache, LayerParts
from ragcache_kernels.layer_ops import Norm
from ragcache_kernels.native import structs
from ragcache_kernels.native.attention import AttentionCalls, Logits
from ragcache_kernels.native.linear import ADD, LinearCall, PackedLinear
from ragcache_kernels.native.plan import NativePlan
from ragcache_kernels.native.structs import ACTIVATIONS, Pool, weight_dtype

Angles = tuple[Tensor, Tensor]
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
        ("last", POINTER(StepCall)),
        ("kept", c_void_p),
        ("num_kept", c_int64),
    )

    @classmethod
    def of(cls, layers: list[Any], steps: list[Any], hidden: Tensor, output: Tensor) -> Stack:
        """Pointers to each layer's and step's arguments."""
        count = len(layers)
        return cls(
            (POINTER(LayerCall) * count)(*layers),
            (POINTER(StepCall) * count)(*steps),
            hidden.data_ptr(),
            output.data_ptr(),
            count,
        )


class NativeLayer:
    """A layer whose arguments are put together once, and for each step what is new in it."""

    def __init__(self, calls: AttentionCalls, parts: LayerParts) -> None:
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
        self._pointer = pointer(self._call)
        # Those of a kind have the same arguments in a step.
        self.kind = parts.spec.window, parts.heads, parts.kv_heads, self._dim, self._gated_size

    def bind(self, cache: LayerCache, rotary: int) -> Any:
        """A pointer to the layer's arguments; its pool stays where it is from step to step."""
        if cache is self._cache:
            return self._pointer
        self._cache = cache
        attention, rotation = self._call.attention, self._call.rotation
        attention.key = rotation.key = Pool.of(cache.key, cache.key_scale)
        attention.value = rotation.value = Pool.of(cache.value, cache.value_scale)
        rotation.block_size = cache.key.shape[1]
        rotation.rotary = rotary if self._parts.rotates else 0
        self._logits.put_into(attention)
        return self._pointer

    def step(self, hidden: Tensor, angles: Angles, cache: LayerCache, plan: NativePlan) -> Any:
        """A pointer to what this layer and others of its kind are given in this step.

        Raises TypeError for hidden states or angles that are not the weights' kind.
        """
        if hidden.dtype is not self._dtype or hidden.shape[1] != self._size:
            raise TypeError(f"{hidden.dtype} {list(hidden.shape)} for a layer in {self._dtype}")
        key = angles[0].data_ptr(), self.kind
        if key not in plan.steps:
            plan.steps[key] = self._new_step(angles, cache, plan)
        return plan.steps[key][0]

    def _new_step(
        self, angles: Angles, cache: LayerCache, plan: NativePlan
    ) -> tuple[Any, list[Tensor]]:
        parts, (cos, sin), tokens = self._parts, angles, len(plan.slots)
        if not cos.dtype is sin.dtype is self._dtype or cos.stride() != sin.stride():
            raise TypeError(f"cosines in {cos.dtype} for {self._dtype}")
        attended = parts.heads * self._dim
        sizes = {
            "normed": self._size,
            "qkv": attended + 2 * parts.kv_heads * self._dim,
            "query": attended,
            "attended": attended,
            "gated": self._gated_size,
            "update": self._size,
        }
        take = self._calls.scratch.take
        between = {
            name: take(name, (tokens, size), self._dtype, _CPU) for name, size in sizes.items()
        }
        work, memory = self._calls.build(parts.heads, cache, plan, parts.spec.window, self._dtype)
        work.query_token, work.query_head = attended, self._dim
        step = StepCall(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            angles_token=cos.stride(0),
            slots=plan.slots.data_ptr(),
            work=work,
            **{name: tensor.data_ptr() for name, tensor in between.items()},
        )
        return pointer(step), [*angles, *between.values(), *memory]  # which live as long

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
