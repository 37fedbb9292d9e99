"""A layer's packed projections: queries and keys rotated, keys and values into their slots."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ragcache_kernels.interface import LayerCache
from ragcache_kernels.layer_ops import Rotation
from ragcache_kernels.triton.norm import weighted
from ragcache_kernels.triton.write import store_heads


@triton.jit
def _load_rotated(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """`HEADS` heads of one token, normalised if there is a weight for it, then rotated."""
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_DIM)
    inside, turning = dims < DIM, dims < ROTARY
    # Each element needs its partner from the other half: a second load, from the same lines.
    partners = (dims + ROTARY // 2) % ROTARY
    start = heads_ptr + heads * head_stride
    dtype = heads_ptr.dtype.element_ty
    rows = tl.load(start + dims[None, :], mask=(heads < HEADS) & inside[None, :], other=0.0)
    other = tl.load(start + partners[None, :], mask=(heads < HEADS) & turning[None, :], other=0.0)
    rows, other = rows.to(tl.float32), other.to(tl.float32)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(rows * rows, 1) / DIM + eps)[:, None]
        weight = tl.load(norm_ptr + dims, mask=inside, other=0.0)[None, :]
        rows = weighted(rows, scale, weight).to(dtype).to(tl.float32)
        weight = tl.load(norm_ptr + partners, mask=turning, other=0.0)[None, :]
        other = weighted(other, scale, weight).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + dims, mask=turning, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + dims, mask=turning, other=0.0).to(tl.float32)
    sin = tl.where(dims < ROTARY // 2, -sin, sin)
    return (rows * cos[None, :] + other * sin[None, :]).to(dtype)


@triton.jit
def rotate_tokens(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    qkv_token,
    qkv_head,
    cos_token,
    sin_token,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    query_eps,
    key_eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (t, p): heads [p·HEADS, (p + 1)·HEADS) of token t, where HEADS is that of the KV.

    The last two programs of a token have its keys and its values, which a slot of -1 leaves out;
    the others have queries, which go to the dense `out`.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    groups = tl.num_programs(1) - 2
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_DIM)[None, :]
    inside = (heads < HEADS) & (dims < DIM)
    qkv_ptr += token * qkv_token + part * HEADS * qkv_head
    cos_ptr += token * cos_token
    sin_ptr += token * sin_token
    if part < groups:
        rows = _load_rotated(
            qkv_ptr, cos_ptr, sin_ptr, query_norm_ptr, qkv_head, query_eps,
            HEADS, DIM, ROTARY, PADDED_HEADS, PADDED_DIM,
        )  # fmt: skip
        out_ptr += (token * groups + part) * HEADS * DIM
        tl.store(out_ptr + heads * DIM + dims, rows, mask=inside)
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    if part == groups:
        rows = _load_rotated(
            qkv_ptr, cos_ptr, sin_ptr, key_norm_ptr, qkv_head, key_eps,
            HEADS, DIM, ROTARY, PADDED_HEADS, PADDED_DIM,
        )  # fmt: skip
        store_heads(rows, slot, k_ptr, k_scale_ptr, k_block, k_slot, k_head, HEADS, DIM, BLOCK_SIZE)
    else:
        rows = tl.load(qkv_ptr + heads * qkv_head + dims, mask=inside, other=0.0)
        store_heads(rows, slot, v_ptr, v_scale_ptr, v_block, v_slot, v_head, HEADS, DIM, BLOCK_SIZE)


def rotate_and_write(
    qkv: Tensor, rotation: Rotation, cache: LayerCache, slots: Tensor, block_size: int
) -> Tensor:
    """See `AttentionBackend.rotate_and_write`; elements of a row of qkv lie side by side."""
    tokens, heads, dim = qkv.shape
    kv_heads = cache.key.shape[2]
    out = qkv.new_empty(tokens, heads - 2 * kv_heads, dim)
    query_norm, key_norm = rotation.query_norm, rotation.key_norm
    rotate_tokens[(tokens, heads // kv_heads)](
        qkv,
        rotation.cos,
        rotation.sin,
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        out,
        cache.key,
        cache.value,
        cache.key_scale,
        cache.value_scale,
        slots,
        *qkv.stride()[:2],
        rotation.cos.stride(0),
        rotation.sin.stride(0),
        *cache.key.stride()[:3],
        *cache.value.stride()[:3],
        0.0 if query_norm is None else query_norm.eps,
        0.0 if key_norm is None else key_norm.eps,
        HEADS=kv_heads,
        DIM=dim,
        ROTARY=rotation.cos.shape[1],
        PADDED_HEADS=triton.next_power_of_2(kv_heads),
        PADDED_DIM=triton.next_power_of_2(dim),
        BLOCK_SIZE=block_size,
    )
    return out
