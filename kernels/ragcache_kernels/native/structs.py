"""The C functions' arguments, field by field as in `src/ops.h` and `src/attention.h`."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ragcache_kernels import layer_ops

# `enum dtype`
ACTIVATIONS = {torch.float32: 0, torch.bfloat16: 1}
DTYPES = {**ACTIVATIONS, torch.int8: 2, torch.float8_e4m3fn: 3}
MAX_DIM = 256  # elements of a head


class Pool(ctypes.Structure):
    """The keys or the values of a layer."""

    _fields_ = (
        ("rows", c_void_p),
        ("scales", c_void_p),
        ("block", c_int64),
        ("slot", c_int64),
        ("head", c_int64),
        ("dim", c_int32),
        ("dtype", c_int32),
    )

    @classmethod
    def of(cls, rows: Tensor, scales: Tensor | None) -> Pool:
        """Rows `[N, B, Hkv, D]` with scales `[N, B, Hkv]` where they are quantised."""
        block, slot, head, element = rows.stride()
        dtype, dim = DTYPES.get(rows.dtype), rows.shape[3]
        if dtype is None or (rows.itemsize == 1) != (scales is not None):
            raise TypeError(f"the C kernels take no pool of {rows.dtype}")
        if element != 1 or dim > MAX_DIM:
            raise ValueError(f"the C kernels take no pool of shape {tuple(rows.shape)}")
        return cls(rows.data_ptr(), pointer(scales), block, slot, head, dim, dtype)


class Norm(ctypes.Structure):
    """Of `run_rms_norm`."""

    _fields_ = (
        ("hidden", c_void_p),
        ("update", c_void_p),
        ("weight", c_void_p),
        ("total", c_void_p),
        ("out", c_void_p),
        ("hidden_row", c_int64),
        ("update_row", c_int64),
        ("rows", c_int32),
        ("size", c_int32),
        ("dtype", c_int32),
        ("weight_dtype", c_int32),
        ("eps", c_float),
    )


class Rotation(ctypes.Structure):
    """Of `run_rotate_and_write`."""

    _fields_ = (
        ("qkv", c_void_p),
        ("query", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_weight", c_void_p),
        ("key_weight", c_void_p),
        ("slots", c_void_p),
        ("key", Pool),
        ("value", Pool),
        ("qkv_token", c_int64),
        ("qkv_head", c_int64),
        ("angles_token", c_int64),
        ("tokens", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("rotary", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
        ("weight_dtype", c_int32),
        ("query_eps", c_float),
        ("key_eps", c_float),
    )


class Writing(ctypes.Structure):
    """Of `run_write_kv`."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("slots", c_void_p),
        ("key", Pool),
        ("value", Pool),
        ("key_token", c_int64),
        ("key_head", c_int64),
        ("value_token", c_int64),
        ("value_head", c_int64),
        ("tokens", c_int32),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
        ("dtype", c_int32),
    )


class Attention(ctypes.Structure):
    """Of `run_attention`."""

    _fields_ = (
        ("query", c_void_p),
        ("out", c_void_p),
        ("key", Pool),
        ("value", Pool),
        ("table", c_void_p),
        ("tiles", c_void_p),
        ("tile_tokens", c_void_p),
        ("positions", c_void_p),
        ("ends", c_void_p),
        ("order", c_void_p),
        ("sinks", c_void_p),
        ("sums", c_void_p),
        ("tops", c_void_p),
        ("totals", c_void_p),
        ("scratch", c_void_p),
        ("query_token", c_int64),
        ("query_head", c_int64),
        ("table_row", c_int64),
        ("tokens", c_int32),
        ("num_tiles", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
        ("most_queries", c_int32),
        ("split", c_int32),
        ("window", c_int32),
        ("dtype", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "run_rms_norm": Norm,
    "run_rotate_and_write": Rotation,
    "run_write_kv": Writing,
    "run_attention": Attention,
}


def declare(library: Any) -> None:
    """Tell ctypes what the functions take."""
    for name, struct in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, [c_void_p, ctypes.POINTER(struct)]
    library.pool_is_paired.argtypes = [ctypes.POINTER(Pool), c_int, c_int, c_int]
    library.attention_scratch.restype = c_int64
    library.attention_scratch.argtypes = [ctypes.POINTER(Attention)]


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's elements lie; None, which is NULL, for none."""
    return None if tensor is None else tensor.data_ptr()


def activation(tensor: Tensor) -> int:
    """The number of a dtype that activations may have; raises TypeError for others."""
    if tensor.dtype not in ACTIVATIONS:
        raise TypeError(f"the C kernels take float32 and bfloat16, not {tensor.dtype}")
    return ACTIVATIONS[tensor.dtype]


def dense(tensor: Tensor) -> Tensor:
    """With its last dimension in a row; the others may have any stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def weight_dtype(norm: layer_ops.Norm, dtype: torch.dtype, size: int) -> int:
    """The number of the dtype of a norm's weight, once it is known to fit the rows."""
    weight = norm.weight
    if weight.shape != (size,) or not weight.is_contiguous():
        raise ValueError(f"a weight of {tuple(weight.shape)} for rows of {size}")
    if weight.dtype is not torch.float32 and weight.dtype is not dtype:
        raise TypeError(f"a weight in {weight.dtype} for rows in {dtype}")
    return ACTIVATIONS[weight.dtype]
